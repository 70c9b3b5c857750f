"""How many requests were finished, also while nobody can say."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from math import exp
from typing import Final

from vllm_headroom.derive.leak.facts import Observation, Work
from vllm_headroom.derive.page_facts import begun_anew

AVERAGE_SECONDS: Final = 300.0
MILEAGE_SECONDS: Final = 900.0
MILEAGE_POINTS: Final = 97
"""A day in quarters of an hour: the request rate expected over an horizon is that of as long a time before."""


def restarted(work: Work, seen: Observation) -> bool:
    """Return whether this is another life of the engine: its start time or processes changed, or its counter fell."""
    return begun_anew(work.life, seen.life, work.finished_total, seen.finished_total)


def worked(work: Work, seen: Observation, elapsed: float, now: float) -> Work:
    """Return the work done by `now`.

    While the counter cannot be read, requests go on at the last known rate: a gap taken for idleness would make what
    grew in it look like growth without work.
    """
    life = work.life if seen.life is None else seen.life
    if seen.finished_total is None:
        return _mileage(replace(work, requests=work.requests + work.rate * elapsed, life=life), now)
    requests = work.requests
    if work.finished_total is not None:
        requests = max(requests, work.base_requests + seen.finished_total - work.finished_total)
    rate = work.rate
    if elapsed > 0:
        rate += (1 - exp(-elapsed / AVERAGE_SECONDS)) * ((requests - work.requests) / elapsed - rate)
    return _mileage(
        replace(
            work,
            requests=requests,
            rate=rate,
            finished_total=seen.finished_total,
            base_requests=requests,
            life=life,
        ),
        now,
    )


def _mileage(work: Work, now: float) -> Work:
    if work.mileage and now - work.mileage[-1][0] < MILEAGE_SECONDS:
        return work
    return replace(work, mileage=(*work.mileage, (now, work.requests))[-MILEAGE_POINTS:])


def expected_rate(work: Work, now: float, horizon_seconds: float) -> float:
    """Return the requests per second to expect over a horizon: the mean of as long a time back, a day at most."""
    then = bisect_right(work.mileage, now - horizon_seconds, key=_when) - 1
    seconds, requests = work.mileage[max(0, then)] if work.mileage else (now, work.requests)
    if horizon_seconds < MILEAGE_SECONDS or now - seconds < MILEAGE_SECONDS:
        return work.rate
    return (work.requests - requests) / (now - seconds)


def _when(entry: tuple[float, float]) -> float:
    return entry[0]
