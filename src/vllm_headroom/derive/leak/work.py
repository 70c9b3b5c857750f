"""How many requests were finished, also while nobody can say."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from math import exp
from operator import itemgetter
from typing import Final

from vllm_headroom.derive.leak.facts import Observation, Work

AVERAGE_SECONDS: Final = 300.0
MILEAGE_SECONDS: Final = 900.0
RESET_SECONDS: Final = 600.0
"""A counter that stays lower for this long was reset, and is counted on from there."""

MILEAGE_POINTS: Final = 97
"""A day in quarters of an hour: the request rate expected over an horizon is that of as long a time before."""


def worked(work: Work, seen: Observation, elapsed: float, now: float) -> Work:
    """Return the work done by `now`.

    While the counter cannot be read, or a lower one of another server is, requests go on at the last known rate: a gap
    taken for idleness would make what grew in it look like growth without work.
    """
    life = work.life or seen.life
    highest, total = work.finished_total, seen.finished_total
    lower = highest is not None and total is not None and total < highest
    since = (now if work.below_since is None else work.below_since) if lower else None
    requests, rate, base = work.requests, work.rate, work.base_requests
    if total is None or (since is not None and now < since + RESET_SECONDS):
        requests += rate * elapsed
        return replace(
            work, requests=requests, life=life, below_since=since, mileage=_mileage(work.mileage, now, requests)
        )
    if highest is not None and not lower:
        requests = max(requests, base + total - highest)
    if elapsed > 0:
        rate += (1 - exp(-elapsed / AVERAGE_SECONDS)) * ((requests - work.requests) / elapsed - rate)
    return Work(
        requests=requests,
        rate=rate,
        finished_total=total,
        base_requests=requests,
        life=life,
        mileage=_mileage(work.mileage, now, requests),
    )


def _mileage(mileage: tuple[tuple[float, float], ...], now: float, requests: float) -> tuple[tuple[float, float], ...]:
    if mileage and now - mileage[-1][0] < MILEAGE_SECONDS:
        return mileage
    return (*mileage, (now, requests))[-MILEAGE_POINTS:]


def expected_rate(work: Work, now: float, horizon_seconds: float) -> float:
    """Return the requests per second to expect over a horizon: the mean of as long a time back, a day at most."""
    then = bisect_right(work.mileage, now - horizon_seconds, key=itemgetter(0)) - 1
    seconds, requests = work.mileage[max(0, then)] if work.mileage else (now, work.requests)
    if horizon_seconds < MILEAGE_SECONDS or now - seconds < MILEAGE_SECONDS:
        return work.rate
    return (work.requests - requests) / (now - seconds)
