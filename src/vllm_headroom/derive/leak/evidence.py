"""How often does the floor of memory rise, against how often work alone would make it rise?"""

from __future__ import annotations

from dataclasses import replace
from math import exp, log
from typing import Final

from vllm_headroom.derive.leak.facts import MIB, Level, Point, Verdict

BLOCK_SECONDS: Final = 30.0
PARTS: Final = (1, 4, 4, 2, 2, 4)
"""How many blocks of the level below make one: 30 s, 2, 8, 16, 32 and 128 minutes. Longer ones see past the teeth of a
collector, whose period must fit into a block."""

THRESHOLDS: Final = (16.7, 15.3, 13.9, 13.2, 12.5, 11.1)
"""ln(1000 days x blocks a day x 6 levels): under the null a false alarm takes e^threshold blocks (e-detectors)."""

RISE_BYTES: Final = MIB
"""Below every allocator's smallest step, which is 2 MiB (cudaMalloc, torch's small pool)."""

RECORDS: Final = 6.0
"""Independent sources of records and first uses: the chance of one in a block is at most this times ln(n1/n0)."""

CHANCE_IN_A_LEAK: Final = 0.8
LEAST_CHANCE: Final = 0.10
"""Real benign steps come in clusters, so no rise is ever thought rarer than this."""

BACKGROUND_PER_SECOND: Final = 0.15 / 3600
USELESS_CHANCE: Final = 0.75
"""In blocks in which a rise is this likely anyway, there is no evidence either way: the warm-up, by itself."""

SPARE: Final = 4.0
NEWEST_POINTS: Final = 62
"""Two hours of the second level, as an alarm may have to wait for, and no more than memory allows."""

MISSES_THAT_END_IT: Final = (6, 6, 5, 2, 1, 1)
"""Blocks without a rise that end a verdict, by level: within an hour or so of the last rise, which may have come early
in its block, at the levels whose blocks allow it."""


def chance(first: tuple[float, float], last: tuple[float, float]) -> float:
    """Return the chance that a healthy engine's floor rises between two (seconds, requests) since the anchor.

    The n-th of exchangeable demands is a record with chance 1/n (Rényi), and an event of log-uniform rarity is first
    seen at rate 1/n, so J sources give at most J ln(n1/n0); idle processes age by time instead.
    """
    background = 1.0 - exp(-BACKGROUND_PER_SECOND * (last[0] - first[0]))
    return max(RECORDS * folds(first, last), LEAST_CHANCE, background)


def folds(first: tuple[float, float], last: tuple[float, float]) -> float:
    """Return how many times the work done grew e-fold between two (seconds, requests) since the anchor."""
    return max(log((last[0] + 60.0) / (first[0] + 60.0)), log((last[1] + 50.0) / (first[1] + 50.0)))


def weigh(level: Level, point: Point, rise_chance: float, threshold: float) -> Level:
    """Return the level with the evidence of its block, which ends; its reference must be known."""
    assert level.reference_bytes is not None  # noqa: S101 - the caller sets it with the first block
    rose = point.floor_bytes >= level.reference_bytes + RISE_BYTES
    score = level.score
    if rise_chance < USELESS_CHANCE:
        odds = CHANCE_IN_A_LEAK / rise_chance if rose else (1 - CHANCE_IN_A_LEAK) / (1 - rise_chance)
        score = min(threshold + SPARE, max(0.0, score + log(odds)))
    return replace(
        level,
        block=None,
        reference_bytes=max(level.reference_bytes, point.floor_bytes),
        score=score,
        points=(*level.points, point)[-NEWEST_POINTS:],
        began=level.began if score > 0 and level.began is not None else point,
        misses=0 if rose else level.misses + 1,
    )


def stretch(level: Level) -> tuple[Point, ...]:
    """Return the newest blocks since the score was last 0."""
    began = level.began
    return () if began is None else tuple(point for point in level.points if point.seconds >= began.seconds)


def settle(level: Level, judged: Verdict, threshold: float, most_misses: int, floor_bytes: float) -> Level:
    """Return the level with its verdict: it rises with the evidence, and ends with the growth or when that is gone."""
    ended = level.misses >= most_misses or level.score < threshold / 2 or _given_back(level, floor_bytes)
    verdict = Verdict.NONE if ended else max(level.verdict, judged)
    return level if verdict is level.verdict else replace(level, verdict=verdict)


def _given_back(level: Level, floor_bytes: float) -> bool:
    """Return whether less is left than half of what grew."""
    if level.reference_bytes is None or level.began is None:
        return False
    return floor_bytes < (level.began.floor_bytes + level.reference_bytes) / 2
