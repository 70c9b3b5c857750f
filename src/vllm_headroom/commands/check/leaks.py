"""The limits on leaks: what the detector says, and whether it could have said so."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

from vllm_headroom.commands.check.doubts import doubt
from vllm_headroom.commands.check.follow import Followed, faintest, follow
from vllm_headroom.commands.check.judgement import Judgement, Outcome, Unit
from vllm_headroom.commands.check.record import Record
from vllm_headroom.commands.check.series import Series
from vllm_headroom.derive.leak.facts import Estimate
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
    followed = follow(series.readings)
    before = None if past is None else follow(past.readings)
    told = _alarm(followed, most) if followed.leaking else _quiet(followed, record, series, most)
    return Judgement(
        limit=limit,
        of=series.name,
        outcome=told.outcome,
        unit=Unit.BYTES,
        value=told.value,
        most=most,
        baseline=None if before is None else _per_thousand(before.estimate),
        found=told.found,
        allowed=size(most),
        before=None if before is None else _words(before),
        why=told.why,
    )


def _alarm(followed: Followed, most: float) -> _Told:
    """Judge an alarm: it fails at its best figure, and passes only when its whole interval is below the limit."""
    found = followed.estimate
    value = _per_thousand(found)
    if value is None or found is None or found.bytes_per_second <= 0:
        return _Told(outcome=Outcome.FAILED, value=None, found="a leak", why=NO_RATE)
    low, high = (value * end / found.bytes_per_second for end in (found.lower, found.upper))
    why = f"the detector's alarm; 95 %: {size(low)} to {size(high)}, {size(found.leaked_bytes)} in all"
    outcome = Outcome.FAILED if value > most else Outcome.PASSED if high <= most else Outcome.CANNOT_TELL
    if outcome is Outcome.CANNOT_TELL:
        why += f"; {LONGER}"
    return _Told(outcome=outcome, value=value, found=size(value), why=why)


def _quiet(followed: Followed, record: Record, series: Series, most: float) -> _Told:
    """Judge a series without an alarm: it passes when a leak at the limit would not have gone unseen."""
    if followed.growing:
        why = f"an early warning, and steady growth takes an hour or more to be called a leak: {LONGER}"
        value = _per_thousand(followed.estimate)
        return _Told(outcome=Outcome.CANNOT_TELL, value=value, found=_words(followed), why=why)
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


def _words(followed: Followed) -> str:
    value = _per_thousand(followed.estimate)
    if not (followed.leaking or followed.growing):
        return NONE_SEEN
    word = "a leak" if followed.leaking else "growing"
    return word if value is None else size(value) if followed.leaking else f"{word}, {size(value)}"


def _per_thousand(found: Estimate | None) -> float | None:
    if found is None or found.bytes_per_request is None or found.bytes_per_request <= 0:
        return None
    return THOUSAND * found.bytes_per_request
