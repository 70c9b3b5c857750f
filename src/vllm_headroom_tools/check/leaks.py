"""Limits on leaks, and whether the detector would have found a leak at the limit."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil
from typing import Final

from msgspec.structs import replace

from vllm_headroom.derive.leak.facts import Certainty as Detected
from vllm_headroom.derive.leak.facts import start_track
from vllm_headroom.derive.leak.track import observe
from vllm_headroom.units import MIB, format_duration, format_size
from vllm_headroom_tools.check.limits import HOST_LEAK, LEAK, Judgement
from vllm_headroom_tools.check.record import (
    DetectorInput,
    MemorySeries,
    TraceRecord,
    find_doubt,
    pair_gpus,
)
from vllm_headroom_tools.conclusion import Conclusion
from vllm_headroom_tools.history import LeakCourse, Moment

THOUSAND: Final = 1000
NONE_SEEN: Final = "none seen"
LONGER: Final = "record for longer, or send more requests"


def judge_gpu_leaks(
    record: TraceRecord, before: TraceRecord | None, most: float
) -> Iterator[Judgement]:
    """Judge the leak per thousand requests of each GPU; `most` is in bytes."""
    for gpu, past in pair_gpus(record, before):
        yield _judge_leak(LEAK, record, gpu, past, most)


def judge_host_leaks(
    record: TraceRecord, before: TraceRecord | None, most: float
) -> Iterator[Judgement]:
    """Judge the leak per thousand requests of each role of the engine's processes."""
    for role, series in sorted(record.host.items()):
        yield _judge_leak(
            HOST_LEAK, record, series, None if before is None else before.host.get(role), most
        )


def _judge_leak(
    limit: str, record: TraceRecord, series: MemorySeries, past: MemorySeries | None, most: float
) -> Judgement:
    draft = Judgement(
        limit=limit,
        of=series.name,
        verdict=Conclusion.CANNOT_TELL,
        most=most,
        baseline=None if past is None else _compute_per_thousand(past.course.newest),
        found=NONE_SEEN,
        before=None if past is None else _describe_course(past.course),
    )
    found = series.course.last_alarm
    return (
        _judge_quiet(draft, record, series, most)
        if found is None
        else _judge_alarm(draft, found, most)
    )


def _judge_alarm(draft: Judgement, found: Moment, most: float) -> Judgement:
    """Judge an alarm: it fails by its estimate, and passes only if its whole interval is below the limit."""
    value, rate = _compute_per_thousand(found), found.bytes_per_second or 0.0
    low, high = found.bytes_per_second_lower, found.bytes_per_second_upper
    if value is None or rate <= 0 or low is None or high is None or found.leaked_bytes is None:
        why = "the detector's alarm: it grows while no requests finish"
        return replace(draft, verdict=Conclusion.NOT_GOOD, found="a leak", why=why)
    low, high = value * low / rate, value * high / rate
    bounds = f"{format_size(low)} to {format_size(high)}"
    why = f"the detector's alarm; 95 %: {bounds}, {format_size(found.leaked_bytes)} in all"
    verdict = (
        Conclusion.NOT_GOOD
        if value > most
        else Conclusion.GOOD
        if high <= most
        else Conclusion.CANNOT_TELL
    )
    if verdict is Conclusion.CANNOT_TELL:
        why += f"; {LONGER}"
    return replace(draft, verdict=verdict, value=value, found=None, why=why)


def _judge_quiet(
    draft: Judgement, record: TraceRecord, series: MemorySeries, most: float
) -> Judgement:
    """Judge a series without an alarm: it passes if the detector would have found a leak at the limit."""
    if series.course.is_undecided:
        why = f"an early warning; steady growth takes an hour or more to become an alarm: {LONGER}"
        value = _compute_per_thousand(series.course.newest)
        return replace(draft, value=value, found=_describe_course(series.course), why=why)
    missing = find_doubt(record, series.coverage, series.name)
    if missing is not None:
        return replace(draft, why=missing)
    limit = most / THOUSAND
    seen = find_smallest_visible(series.readings, limit)
    done = f"in {format_duration(record.watched.seconds)} and {record.finished.total:,.0f} requests"
    if seen == limit:
        why = f"one of {format_size(most)} or more would have been seen {done}"
        return replace(draft, verdict=Conclusion.GOOD, why=why)
    why = f"one at the limit would not have been seen {done}"
    if seen is not None:
        why += f", only one of {format_size(THOUSAND * seen)} or more: record about {seen / limit:.0f} times as many"
    return replace(draft, why=why)


def _describe_course(course: LeakCourse) -> str:
    value = _compute_per_thousand(course.newest)
    if course.last_alarm is None and not course.is_undecided:
        return NONE_SEEN
    if course.last_alarm is None:
        return "growing" if value is None else f"growing, {format_size(value)}"
    return "a leak" if value is None else format_size(value)


def _compute_per_thousand(found: Moment | None) -> float | None:
    if found is None or found.bytes_per_request is None or found.bytes_per_request <= 0:
        return None
    return THOUSAND * found.bytes_per_request


STEP_BYTES: Final = 2 * MIB
"""An allocator takes at least this at a time (cudaMalloc, torch's small pool), so a leak grows in such steps."""

STRONGER: Final = 10
"""How often a leak is doubled until the detector finds it."""


def find_smallest_visible(
    readings: Sequence[DetectorInput], bytes_per_request: float
) -> float | None:
    """Return the leak per request that the detector would have found: this one, its first such double, or None.

    The detector gets the readings with a steady leak added. The drift in the later half counts towards that leak: it
    may be a leak that was missed, or hide one.
    """
    own = _measure_drift(readings)
    if own is None:
        return None
    leaks = (bytes_per_request * 2**power for power in range(STRONGER + 1))
    return next((leak for leak in leaks if leak > own and _can_see(readings, leak - own)), None)


def _measure_drift(readings: Sequence[DetectorInput]) -> float | None:
    """Return how far the floor moved over the later half, up or down, per request; a floor is of an eighth."""
    eighth, half, last = len(readings) // 8, len(readings) // 2, len(readings)
    before, after = (
        min(
            (
                seen.held_bytes
                for seen, _ in readings[end - eighth : end]
                if seen.held_bytes is not None
            ),
            default=None,
        )
        for end in (half, last)
    )
    done = sum(max(0.0, later - sooner) for (_, sooner), (_, later) in pairwise(readings[half:]))
    return None if before is None or after is None or not done else abs(after - before) / done


def _can_see(readings: Sequence[DetectorInput], bytes_per_request: float) -> bool:
    track = start_track(readings[0][0].seconds)
    for seen, done in readings:
        leaked_bytes = ceil(done * bytes_per_request / STEP_BYTES) * STEP_BYTES
        leaking = replace(
            seen,
            held_bytes=None if seen.held_bytes is None else seen.held_bytes + leaked_bytes,
            room_bytes=None if seen.room_bytes is None else seen.room_bytes - leaked_bytes,
        )
        track = observe(track, leaking)
        if track.verdict is Detected.LEAKING:
            return True
    return track.verdict is Detected.GROWING
