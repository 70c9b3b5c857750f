"""The limits on leaks: what the detector says, and whether it could have said so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil
from typing import Final

from msgspec.structs import replace

from vllm_headroom.derive.leak.facts import MIB, Observation, Track
from vllm_headroom.derive.leak.facts import Verdict as Detected
from vllm_headroom.derive.leak.track import observe
from vllm_headroom.units import duration, size
from vllm_headroom_tools.check.limits import HOST_LEAK, LEAK, Judgement, Unit
from vllm_headroom_tools.check.record import MemorySeries, Reading, Record, doubt, paired
from vllm_headroom_tools.conclusion import Conclusion
from vllm_headroom_tools.history.course import Course, Moment

THOUSAND: Final = 1000
NONE_SEEN: Final = "none seen"
NO_RATE: Final = "the detector's alarm: it grows while no requests finish"
LONGER: Final = "record for longer, or send more requests"


def gpu_leaks(record: Record, before: Record | None, most: float) -> Iterator[Judgement]:
    """Yield the leak per thousand requests of each GPU; `most` is in bytes."""
    for gpu, past in paired(record, before):
        yield _leak(LEAK, record, gpu, past, most)


def host_leaks(record: Record, before: Record | None, most: float) -> Iterator[Judgement]:
    """Yield the same of each role of the engine's processes."""
    for role, series in sorted(record.host.items()):
        yield _leak(HOST_LEAK, record, series, None if before is None else before.host.get(role), most)


def _leak(limit: str, record: Record, series: MemorySeries, past: MemorySeries | None, most: float) -> Judgement:
    told = Judgement(
        limit=limit,
        of=series.name,
        verdict=Conclusion.CANNOT_TELL,
        unit=Unit.BYTES,
        most=most,
        baseline=None if past is None else _per_thousand(_newest(past.course)),
        found=NONE_SEEN,
        before=None if past is None else _words(past.course),
    )
    found = series.course.last
    return _quiet(told, record, series, most) if found is None else _alarm(told, found, most)


def _alarm(told: Judgement, found: Moment, most: float) -> Judgement:
    """Judge an alarm: it fails at its best figure, and passes only when its whole interval is below the limit."""
    value, ends = _per_thousand(found), _interval(found)
    if value is None or ends is None or found.leaked_bytes is None:
        return replace(told, verdict=Conclusion.NOT_GOOD, found="a leak", why=NO_RATE)
    low, high = ends
    why = f"the detector's alarm; 95 %: {size(low)} to {size(high)}, {size(found.leaked_bytes)} in all"
    verdict = Conclusion.NOT_GOOD if value > most else Conclusion.GOOD if high <= most else Conclusion.CANNOT_TELL
    if verdict is Conclusion.CANNOT_TELL:
        why += f"; {LONGER}"
    return replace(told, verdict=verdict, value=value, found=None, why=why)


def _interval(found: Moment) -> tuple[float, float] | None:
    """Return the 95 % interval of the leak per thousand requests."""
    rate, low, high = found.bytes_per_second, found.bytes_per_second_lower, found.bytes_per_second_upper
    value = _per_thousand(found)
    if value is None or rate is None or rate <= 0 or low is None or high is None:
        return None
    return value * low / rate, value * high / rate


def _quiet(told: Judgement, record: Record, series: MemorySeries, most: float) -> Judgement:
    """Judge a series without an alarm: it passes when a leak at the limit would not have gone unseen."""
    if series.course.undecided:
        why = f"an early warning, and steady growth takes an hour or more to be called a leak: {LONGER}"
        value = _per_thousand(_newest(series.course))
        return replace(told, value=value, found=_words(series.course), why=why)
    missing = doubt(record, series.coverage, series.name)
    if missing is not None:
        return replace(told, why=missing)
    limit = most / THOUSAND
    seen = seen_from(series.readings, limit)
    done = f"in {duration(record.watched.seconds)} and {record.finished.total:,.0f} requests"
    if seen == limit:
        return replace(told, verdict=Conclusion.GOOD, why=f"one of {size(most)} or more would have been seen {done}")
    why = f"one at the limit would not have been seen {done}"
    if seen is not None:
        why += f", only one of {size(THOUSAND * seen)} or more: record about {seen / limit:.0f} times as many"
    return replace(told, why=why)


def _words(course: Course) -> str:
    value = _per_thousand(_newest(course))
    if course.last is None and not course.undecided:
        return NONE_SEEN
    word = "growing" if course.last is None else "a leak"
    return word if value is None else size(value) if course.last else f"{word}, {size(value)}"


def _newest(course: Course) -> Moment | None:
    return course.last or course.warning


def _per_thousand(found: Moment | None) -> float | None:
    if found is None or found.bytes_per_request is None or found.bytes_per_request <= 0:
        return None
    return THOUSAND * found.bytes_per_request


STEP_BYTES: Final = 2 * MIB
"""An allocator takes no less at a time (cudaMalloc, torch's small pool), so a leak comes in steps of this."""

STRONGER: Final = 10
"""How often a leak is doubled until it would be seen."""


def seen_from(readings: Sequence[Reading], bytes_per_request: float) -> float | None:
    """Return the leak per request that would have been seen: this one, or else the first of its doubles, or None.

    The detector is fed the very readings with a steady leak added; what moved anyway in the later half counts towards
    it, since it may be a leak that was not seen, or hide one.
    """
    own = _drift(readings)
    if own is None:
        return None
    leaks = (bytes_per_request * 2**power for power in range(STRONGER + 1))
    return next((leak for leak in leaks if leak > own and _sees(readings, leak - own)), None)


def _drift(readings: Sequence[Reading]) -> float | None:
    """Return how far the floor of an eighth of the readings moved over half of them, up or down, per request."""
    eighth, half, last = len(readings) // 8, len(readings) // 2, len(readings)
    before, after = (_floor(readings[end - eighth : end]) for end in (half, last))
    done = sum(max(0.0, later - sooner) for (_, sooner), (_, later) in pairwise(readings[half:]))
    return None if before is None or after is None or not done else abs(after - before) / done


def _floor(readings: Sequence[Reading]) -> int | None:
    return min((seen.held_bytes for seen, _ in readings if seen.held_bytes is not None), default=None)


def _sees(readings: Sequence[Reading], bytes_per_request: float) -> bool:
    """Tell whether a leak would have given an alarm, or an early warning that lasts."""
    track = Track(clock=readings[0][0].seconds)
    for seen, done in readings:
        track = observe(track, _leaking(seen, ceil(done * bytes_per_request / STEP_BYTES) * STEP_BYTES))
        if track.verdict is Detected.LEAKING:
            return True
    return track.verdict is Detected.GROWING


def _leaking(seen: Observation, leaked_bytes: int) -> Observation:
    return replace(
        seen,
        held_bytes=None if seen.held_bytes is None else seen.held_bytes + leaked_bytes,
        room_bytes=None if seen.room_bytes is None else seen.room_bytes - leaked_bytes,
    )
