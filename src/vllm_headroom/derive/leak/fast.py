"""Growth so fast that blocks would come too late: a minute of readings that only rise."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Final

from vllm_headroom.derive.leak.evidence import RISE_BYTES
from vllm_headroom.derive.leak.facts import MIB, Estimate, Run
from vllm_headroom.derive.leak.shape import OUT_OF_MEMORY_BYTES

APART_SECONDS: Final = 5.0
APART_MOST_SECONDS: Final = 90.0
READINGS: Final = 12
"""Rises that are compared, at least and at most so many seconds apart: 55 s of them at the default interval."""

FEWEST_READINGS: Final = 6
LEAST_SECONDS: Final = 50.0
FAST_SECONDS: Final = 600.0
STILL_FAST_SECONDS: Final = 3600.0
"""The device would be full within this; an alarm goes on while it would be within that."""

STEP_BYTES: Final = 20 * MIB
"""The true amount is known to one of the allocator's segments."""

QUIET_SECONDS: Final = 300.0
"""So long after a start or a wake nothing counts: memory that comes back is even and fast."""

LASTS_SECONDS: Final = 120.0
LARGEST_SHARE: Final = 0.4
UNEVEN_SHARE: Final = 0.5
"""Of the pace, how far its thirds may be apart: so fast a leak is even, the marks of a first burst are not."""

STEADY_SHARE: Final = 0.3
"""The later half's least share: what comes to its end slows down."""


def followed(run: Run, seconds: float, held_bytes: float) -> Run:
    """Return the run with one more reading; the same where it adds nothing."""
    if not run.seconds:
        return replace(run, seconds=(seconds,), held_bytes=(held_bytes,))
    last_seconds, last_bytes = run.seconds[-1], run.held_bytes[-1]
    if held_bytes < last_bytes or (
        held_bytes >= last_bytes + RISE_BYTES and seconds - last_seconds > APART_MOST_SECONDS
    ):
        return replace(run, seconds=(seconds,), held_bytes=(held_bytes,))
    if held_bytes < last_bytes + RISE_BYTES or seconds - last_seconds < APART_SECONDS:
        return run
    return replace(
        run,
        seconds=(*run.seconds, seconds)[-READINGS:],
        held_bytes=(*run.held_bytes, held_bytes)[-READINGS:],
    )


def fast(run: Run, room_bytes: float, *, on: bool) -> Estimate | None:
    """Return how fast it grows; None unless it grows evenly and would soon fill the room. `on`: the alarm is up."""
    lasted = run.seconds[-1] - run.seconds[0]
    grown = run.held_bytes[-1] - run.held_bytes[0]
    if len(run.seconds) < FEWEST_READINGS or lasted < LEAST_SECONDS or grown <= 0:
        return None
    room = max(0.0, room_bytes - OUT_OF_MEMORY_BYTES)
    if room * lasted > grown * (STILL_FAST_SECONDS if on else FAST_SECONDS) or not _even(run, grown):
        return None
    paces = _paces(run)
    pace = grown / lasted
    half_width = max(paces) - min(paces) + STEP_BYTES / lasted
    if half_width > UNEVEN_SHARE * pace:
        return None
    return Estimate(
        bytes_per_second=pace,
        lower=pace - half_width,
        upper=pace + half_width,
        bytes_per_request=None,
        by_requests=False,
        leaked_bytes=grown,
        pace=pace,
        fastest=pace + half_width,
        oom_seconds=room / pace,
        oom_seconds_lower=room / (pace + half_width),
    )


def _even(run: Run, grown: float) -> bool:
    rises = max(after - before for before, after in pairwise(run.held_bytes))
    pauses = max(after - before for before, after in pairwise(run.seconds))
    late = run.held_bytes[-1] - run.held_bytes[len(run.held_bytes) // 2]
    most = LARGEST_SHARE * (run.seconds[-1] - run.seconds[0])
    return rises <= LARGEST_SHARE * grown and pauses <= most and late >= STEADY_SHARE * grown


def _paces(run: Run) -> list[float]:
    """Return the pace of each third."""
    last = len(run.seconds) - 1
    cuts = [0, last // 3, 2 * last // 3, last]
    return [
        (run.held_bytes[end] - run.held_bytes[begin]) / (run.seconds[end] - run.seconds[begin])
        for begin, end in pairwise(cuts)
    ]
