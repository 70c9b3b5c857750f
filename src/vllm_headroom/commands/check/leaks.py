"""The limits on leaks: what the detector says, and whether it could have said so."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

from vllm_headroom.commands.check.doubts import doubt
from vllm_headroom.commands.check.judgement import Judgement, Outcome, Unit
from vllm_headroom.commands.check.record import Record
from vllm_headroom.commands.check.sensitivity import faintest
from vllm_headroom.commands.check.series import Series
from vllm_headroom.trace.course import Course, Moment
from vllm_headroom.units import duration, size

THOUSAND: Final = 1000
NONE_SEEN: Final = "none seen"
NO_RATE: Final = "the detector's alarm: it grows while no requests finish"
LONGER: Final = "record for longer, or send more requests"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    outcome: Outcome
    value: float | None
    found: str
    why: str


def leak(limit: str, record: Record, series: Series, past: Series | None, most: float) -> Judgement:
    """Return the judgement on one series' leak per thousand requests; `most` is in bytes."""
    course, before = series.course, None if past is None else past.course
    told = _alarm(course.last, most) if course.last else _quiet(course, record, series, most)
    return Judgement(
        limit=limit,
        of=series.name,
        outcome=told.outcome,
        unit=Unit.BYTES,
        value=told.value,
        most=most,
        baseline=None if before is None else _per_thousand(_newest(before)),
        found=told.found,
        allowed=size(most),
        before=None if before is None else _words(before),
        why=told.why,
    )


def _alarm(found: Moment, most: float) -> _Told:
    """Judge an alarm: it fails at its best figure, and passes only when its whole interval is below the limit."""
    value, ends = _per_thousand(found), _interval(found)
    if value is None or ends is None or found.leaked_bytes is None:
        return _Told(outcome=Outcome.FAILED, value=None, found="a leak", why=NO_RATE)
    low, high = ends
    why = f"the detector's alarm; 95 %: {size(low)} to {size(high)}, {size(found.leaked_bytes)} in all"
    outcome = Outcome.FAILED if value > most else Outcome.PASSED if high <= most else Outcome.CANNOT_TELL
    if outcome is Outcome.CANNOT_TELL:
        why += f"; {LONGER}"
    return _Told(outcome=outcome, value=value, found=size(value), why=why)


def _interval(found: Moment) -> tuple[float, float] | None:
    """Return the 95 % interval of the leak per thousand requests."""
    rate, low, high = found.bytes_per_second, found.bytes_per_second_lower, found.bytes_per_second_upper
    value = _per_thousand(found)
    if value is None or rate is None or rate <= 0 or low is None or high is None:
        return None
    return value * low / rate, value * high / rate


def _quiet(course: Course, record: Record, series: Series, most: float) -> _Told:
    """Judge a series without an alarm: it passes when a leak at the limit would not have gone unseen."""
    if course.undecided:
        why = f"an early warning, and steady growth takes an hour or more to be called a leak: {LONGER}"
        value = _per_thousand(_newest(course))
        return _Told(outcome=Outcome.CANNOT_TELL, value=value, found=_words(course), why=why)
    missing = doubt(record, series.coverage, series.name)
    if missing is not None:
        return _Told(outcome=Outcome.CANNOT_TELL, value=None, found=NONE_SEEN, why=missing)
    seen = faintest(series.readings, most / THOUSAND)
    least = inf if seen is None else THOUSAND * seen
    done = f"in {duration(record.watched.seconds)} and {record.finished.total:,.0f} requests"
    if least <= most:
        why = f"one of {size(least)} or more would have been seen {done}"
        return _Told(outcome=Outcome.PASSED, value=None, found=NONE_SEEN, why=why)
    why = f"one at the limit would not have been seen {done}"
    if seen is not None:
        why += f", only one of {size(least)} or more: record about {least / most:.0f} times as many"
    return _Told(outcome=Outcome.CANNOT_TELL, value=None, found=NONE_SEEN, why=why)


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
