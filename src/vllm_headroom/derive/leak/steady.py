"""Does memory that is seen without an allocator's slack grow in small steps and without a pause?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import sqrt
from statistics import fmean, median, variance
from typing import Final

from vllm_headroom.derive.leak.estimate import rated
from vllm_headroom.derive.leak.facts import MIB, Estimate, Verdict

KIB: Final = 1024

RISE_BYTES: Final = 64 * KIB
GIVEN_BACK_BYTES: Final = 512 * KIB
"""A block that rises less says nothing; one that falls by more gave back what it held, which no leak does."""

LEAST_BLOCKS: Final = 8
LEAST_GROWTH_BYTES: Final = 16 * MIB
"""Rises in a row, and growth, before anything is said: two minutes and a half of the post-mortem's leak are 20 MB."""

EVENT_BYTES: Final = 32 * KIB
JITTER: Final = 0.1
"""Whatever grows by events of a size has a variance of its mean times that size, and reading at uneven times adds a
share of the mean. An image's embeddings take megabytes, an adapter or a kernel's first workspace tens of them: what
grows by less than this at a time is no cache of vLLM's."""

LATEST_RISES: Final = 24
LARGER: Final = 4
"""One in so many rises may be larger: kernels go on being used for the first time while it leaks."""

OVERDUE: Final = 2.0

LEAKING_SECONDS: Final = 1800.0
"""A leak is called so when it has lasted for this long: caches that fill as smoothly are full by then."""

PACE: Final = 0.6
"""The least share of the first third's pace that the last third keeps; filling up and warming up fade."""

LOAD_SHARE, LOAD_REQUESTS = 0.15, 2.0
"""Growth of running requests by more than this, from one half to the other, explains growth of memory."""

MOST_POINTS: Final = 120


@dataclass(frozen=True, slots=True)
class Floor:
    """The least that was held in a block of readings, when it ended, requests finished by then and those running."""

    seconds: float
    requests: float
    running: float
    held_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """Rises without a fall: `latest` are the newest floors, `points` all since the first, thinned out."""

    latest: tuple[Floor, ...] = ()
    points: tuple[Floor, ...] = ()
    verdict: Verdict = Verdict.NONE


def followed(steady: Steady, floor: Floor) -> Steady:
    """Return the run with one more block; one in which nothing rose is passed over while little had to rise."""
    if not steady.latest:
        return Steady(latest=(floor,), points=(floor,))
    rise = floor.held_bytes - steady.latest[-1].held_bytes
    if rise < RISE_BYTES:
        goes_on = rise > -GIVEN_BACK_BYTES and not _is_overdue(steady, floor)
        return steady if goes_on else Steady(latest=(floor,), points=(floor,))
    points = (*steady.points, floor)
    grown = replace(
        steady,
        latest=(*steady.latest, floor)[-LATEST_RISES - 1 :],
        points=points if len(points) <= MOST_POINTS else (*points[0:-1:2], floor),
    )
    return replace(grown, verdict=_verdict(grown))


def _is_overdue(steady: Steady, floor: Floor) -> bool:
    """Return whether by the pace of the run twice its usual rise was due by now."""
    if len(steady.latest) == 1:
        return True
    last, usual = steady.latest[-1], median(_rises(steady.latest))
    first = steady.points[0]
    done = last.requests - first.requests
    if done > 0:
        due = (last.held_bytes - first.held_bytes) / done * (floor.requests - last.requests)
    else:
        due = _pace(steady.points) * (floor.seconds - last.seconds)
    return due >= OVERDUE * usual


def _rises(floors: tuple[Floor, ...]) -> list[float]:
    return [after.held_bytes - before.held_bytes for before, after in pairwise(floors)]


def _verdict(steady: Steady) -> Verdict:
    first, last = steady.points[0], steady.points[-1]
    if len(steady.latest) <= LEAST_BLOCKS or last.held_bytes - first.held_bytes < LEAST_GROWTH_BYTES:
        return Verdict.NONE
    if not _is_smooth(steady.latest) or _follows_load(steady.points):
        return steady.verdict
    lasts = last.seconds - first.seconds >= LEAKING_SECONDS
    return Verdict.LEAKING if lasts and _keeps_pace(steady.points) else max(steady.verdict, Verdict.GROWING)


def _is_smooth(latest: tuple[Floor, ...]) -> bool:
    """Return whether the rises are of many small events, by time or by requests, a few larger steps among them."""
    by_time = _pieces(latest, [after.seconds - before.seconds for before, after in pairwise(latest)])
    by_requests = _pieces(latest, [after.requests - before.requests for before, after in pairwise(latest)])
    return by_time or by_requests


def _pieces(latest: tuple[Floor, ...], lengths: list[float]) -> bool:
    if min(lengths) <= 0:
        return False
    rises = _rises(latest)
    pace = median(rise / length for rise, length in zip(rises, lengths, strict=True))
    beside = sorted(rise - pace * length for rise, length in zip(rises, lengths, strict=True))
    usual = pace * fmean(lengths)
    spread = sqrt(variance(beside[: len(beside) - len(beside) // LARGER]))
    return spread <= sqrt(EVENT_BYTES * usual + (JITTER * usual) ** 2)


def _follows_load(points: tuple[Floor, ...]) -> bool:
    half = len(points) // 2
    before, after = (fmean(point.running for point in part) for part in (points[:half], points[half:]))
    return after > before * (1 + LOAD_SHARE) + LOAD_REQUESTS


def _keeps_pace(points: tuple[Floor, ...]) -> bool:
    third = len(points) // 3
    early, late = _pace(points[: third + 1]), _pace(points[-third - 1 :])
    return late >= PACE * early


def _pace(points: tuple[Floor, ...]) -> float:
    """Return growth by request, where requests are counted, else by time."""
    first, last = points[0], points[-1]
    done = last.requests - first.requests
    return (last.held_bytes - first.held_bytes) / (done if done > 0 else last.seconds - first.seconds)


def estimated(steady: Steady, room_bytes: float | None) -> Estimate | None:
    """Return how fast it grows and how long that can last; what is used for the first time meanwhile moves no slope."""
    if not steady.verdict:
        return None
    points = steady.points
    first, last = points[0], points[-1]
    done = last.requests - first.requests
    held = tuple(point.held_bytes for point in points)
    step = median(_rises(steady.latest))
    rate, half_width, _ = rated([point.seconds for point in points], held, step)
    per_request, _, _ = rated([point.requests for point in points], held, step)
    half_width += JITTER * rate
    return Estimate(
        bytes_per_second=rate,
        lower=rate - half_width,
        upper=rate + half_width,
        bytes_per_request=per_request if done > 0 else None,
        by_requests=done > 0,
        leaked_bytes=last.held_bytes - first.held_bytes,
        pace=rate,
        fastest=rate + half_width,
        oom_seconds=None if room_bytes is None else max(0.0, room_bytes) / rate,
        oom_seconds_lower=None if room_bytes is None else max(0.0, room_bytes) / (rate + half_width),
    )
