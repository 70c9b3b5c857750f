"""Windows of blocks: what grew in them, how often it rose, and whether it has ended."""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate, pairwise
from math import log
from typing import Final

from msgspec import Struct

from vllm_headroom.derive.leak.facts import RISE_BYTES, Block, Ring
from vllm_headroom.units import MIB

WINDOW_BLOCKS: Final = (6, 8, 11, 15, 21, 30, 46, 61)
"""The lengths, in blocks, of the windows that are judged."""

LEAST_GROWTH_BYTES: Final = 48 * MIB
"""The least growth for a verdict: a few of the allocator's 20 MiB segments (c10 kLargeBuffer) are
no leak."""

COUNTED_SECONDS: Final = 60.0
"""This time counts as worked before the origin: without it, the work would grow by infinitely many
e-folds in the first block."""

COUNTED_REQUESTS: Final = 50.0
"""This many requests count as finished before the origin, for the same reason."""

LEAST_FOLDS: Final = 1e-9
"""A block without work counts as this many e-folds, because callers divide by the number."""


def count_folds(origin: Block, begin: Block, end: Block) -> float:
    """Return how many times the work done since the origin grew e-fold from `begin` to `end`.

    Work is time or requests, whichever grew by more e-folds. Never 0.
    """
    seconds_until_begin = max(COUNTED_SECONDS, begin.seconds - origin.seconds + COUNTED_SECONDS)
    seconds_until_end = end.seconds - origin.seconds + COUNTED_SECONDS
    requests_until_begin = max(
        COUNTED_REQUESTS, begin.requests - origin.requests + COUNTED_REQUESTS
    )
    requests_until_end = end.requests - origin.requests + COUNTED_REQUESTS
    return max(
        log(seconds_until_end / seconds_until_begin),
        log(requests_until_end / requests_until_begin),
        LEAST_FOLDS,
    )


RISE_SOURCES: Final = 6.0
"""How many independent sources of benign rises are assumed: records and first uses. The n-th of
exchangeable demands is a record with chance 1/n (Rényi), and an event of log-uniform rarity is
first seen at rate 1/n. So this many sources give at most RISE_SOURCES times ln(n1/n0) rises while
the work done grows from n0 to n1."""

RISE_CHANCE_IN_A_LEAK: Final = 0.8
"""Our choice: a leak rises in four blocks of five."""

LEAST_RISE_CHANCE: Final = 0.10
"""Real benign steps come in clusters, so a benign rise in a block is never assumed to be less
likely than this."""

USELESS_CHANCE: Final = 0.75
"""A block in which a benign rise is at least this likely is no evidence: this covers the
warm-up."""


def weigh_blocks(origin: Block, blocks: tuple[Block, ...]) -> tuple[list[float], list[float]]:
    """Return what a rise, and what no rise, in each block but the first adds to the odds of a leak.

    Both lists have one entry less than `blocks`: entry i is for the rise from block i to block
    i + 1. The entries are log likelihood ratios of a leak against records and first uses. A block
    is no evidence if more requests than ever before ran at once in it or in the block before:
    higher load explains a rise, and the rise may show in the floor of the next block only.
    """
    odds_of_rise: list[float] = []
    odds_of_none: list[float] = []
    peak_running = origin.peak_running
    for previous, block in pairwise(blocks):
        benign_chance = max(RISE_SOURCES * count_folds(origin, previous, block), LEAST_RISE_CHANCE)
        if benign_chance < USELESS_CHANCE and block.peak_running <= peak_running:
            odds_of_rise.append(log(RISE_CHANCE_IN_A_LEAK / benign_chance))
            odds_of_none.append(log((1 - RISE_CHANCE_IN_A_LEAK) / (1 - benign_chance)))
        else:  # the block is no evidence, whether it rises or not
            odds_of_rise.append(0.0)
            odds_of_none.append(0.0)
        # One block late: the rise after a new peak of load shows in the floor of the next block.
        peak_running = previous.peak_running
    return odds_of_rise, odds_of_none


class RingSurvey(Struct, frozen=True):
    """The blocks of a ring since the origin, with figures that all windows of them share."""

    blocks: tuple[Block, ...]
    retained_bytes: tuple[float, ...]
    """The lowest floor from each block on: what the block held and was not given back later."""

    highest_bytes: tuple[float, ...]
    """The highest floor until each block, blocks before the origin included."""

    odds_of_rise: tuple[float, ...]
    """What a rise from block i to block i + 1 adds to the odds, see `weigh_blocks`."""

    odds_of_none: tuple[float, ...]
    """What it adds to the odds that there is no rise there."""


class Growth(Struct, frozen=True, kw_only=True):
    """The growth in a window: the retained memory above all that was held before the window."""

    blocks: tuple[Block, ...]
    """The block before the window, and the blocks of the window."""

    retained_bytes: tuple[float, ...]
    """The retained memory at each of these blocks: it never falls."""

    rises_bytes: tuple[float, ...]
    """The rise from block i to block i + 1; 0 where there was none."""

    grown_bytes: float
    """The sum of the rises."""
    typical_step_bytes: float
    """The typical size of a rise: the sum of the squares divided by the sum, so that small rises
    hardly count."""

    lasted_seconds: float
    rise_count: int
    """How many blocks rose by at least RISE_BYTES."""

    rise_odds: float
    """The log likelihood ratio of a leak against records and first uses, by how often it rose."""


def survey_ring(ring: Ring, origin: Block) -> RingSurvey | None:
    """Return a ring's blocks since the origin.

    None where there are too few blocks, or they grew too little, for a verdict.
    """
    oldest = bisect_left(ring.blocks, origin.seconds, key=lambda block: block.seconds)
    if len(ring.blocks) - oldest < WINDOW_BLOCKS[0] + 1:
        return None
    retained_bytes = find_retained(ring.blocks)
    floors = (block.floor_bytes for block in ring.blocks)
    highest_bytes = tuple(accumulate(floors, max, initial=ring.highest_bytes))[1:]
    if retained_bytes[-1] - highest_bytes[oldest] < LEAST_GROWTH_BYTES:
        return None
    odds_of_rise, odds_of_none = weigh_blocks(origin, ring.blocks[oldest:])
    return RingSurvey(
        ring.blocks[oldest:],
        retained_bytes[oldest:],
        highest_bytes[oldest:],
        tuple(odds_of_rise),
        tuple(odds_of_none),
    )


def cut_window(survey: RingSurvey, begin: int) -> Growth:
    """Return the growth from the block at `begin` to the newest; memory must have grown in it."""
    # Memory that only returns to an earlier height is no growth: it counts from the highest floor.
    held_before_bytes = survey.highest_bytes[begin]
    retained_bytes = tuple(
        max(held_before_bytes, floor_bytes) for floor_bytes in survey.retained_bytes[begin:]
    )
    rises_bytes = tuple([later - earlier for earlier, later in pairwise(retained_bytes)])
    grown_bytes = retained_bytes[-1] - retained_bytes[0]
    rising = [rise_bytes for rise_bytes in rises_bytes if rise_bytes >= RISE_BYTES]
    sum_of_squares = sum([rise_bytes * rise_bytes for rise_bytes in rising])
    evidence = zip(
        rises_bytes, survey.odds_of_rise[begin:], survey.odds_of_none[begin:], strict=True
    )
    block_odds = [
        odds_of_rise if rise_bytes >= RISE_BYTES else odds_of_none
        for rise_bytes, odds_of_rise, odds_of_none in evidence
    ]
    return Growth(
        blocks=survey.blocks[begin:],
        retained_bytes=retained_bytes,
        rises_bytes=rises_bytes,
        grown_bytes=grown_bytes,
        typical_step_bytes=sum_of_squares / grown_bytes,
        lasted_seconds=survey.blocks[-1].seconds - survey.blocks[begin].seconds,
        rise_count=len(rising),
        rise_odds=sum(block_odds),
    )


def find_retained(blocks: tuple[Block, ...]) -> tuple[float, ...]:
    """Return, for each block, the lowest floor from that block on."""
    return tuple(accumulate((block.floor_bytes for block in reversed(blocks)), min))[::-1]


def list_falls(rings: tuple[Ring, ...]) -> Iterator[tuple[Block, float]]:
    """Yield each block whose memory was given back in part since, and how many bytes were."""
    now_bytes = rings[0].blocks[-1].floor_bytes
    for ring in rings:
        for block, retained_bytes in zip(ring.blocks, find_retained(ring.blocks), strict=True):
            fall_bytes = block.floor_bytes - min(retained_bytes, now_bytes)
            if fall_bytes > 0:
                yield block, fall_bytes


LAST_SHARE: Final = 0.05
"""The share of a window's growth that is its last part: how long that took shows whether growth has
ended."""

QUIET_SECONDS: Final = 1800.0
"""Growth has not ended before this time without a rise."""

QUIET_GAPS: Final = 1.5
"""Growth has not ended before this many of its usual gaps between rises have passed without a rise,
in seconds and in requests."""


def has_ended(growth: Growth) -> bool:
    """Return whether growth has ended: nothing has risen for long, see `is_over`.

    Only the time since 95 % of the growth were reached counts as quiet, so that a last small rise
    does not extend it. It must be at least twice as long as 5 % take at an even pace.
    """
    last_part_bytes = growth.retained_bytes[-1] - LAST_SHARE * growth.grown_bytes
    newest_rise = growth.blocks[bisect_left(growth.retained_bytes, last_part_bytes)]
    return is_over(
        growth.blocks[0],
        newest_rise,
        growth.blocks[-1],
        step_count=growth.grown_bytes / growth.typical_step_bytes,
        quiet_seconds=max(QUIET_SECONDS, 2 * LAST_SHARE * growth.lasted_seconds),
        quiet_gaps=QUIET_GAPS,
    )


def is_over(
    began: Block,
    newest_rise: Block,
    now: Block,
    *,
    step_count: float,
    quiet_seconds: float,
    quiet_gaps: float,
) -> bool:
    """Return whether nothing has risen since `newest_rise` for long enough to call growth over.

    That is longer than `quiet_seconds`, and longer than `quiet_gaps` times the usual gap between
    the `step_count` steps since `began`. The gaps must have passed in requests too, so that idle
    time does not end it.
    """
    gap_count = max(1.0, step_count - 1)
    gap_seconds = (newest_rise.seconds - began.seconds) / gap_count
    gap_requests = (newest_rise.requests - began.requests) / gap_count
    if now.seconds - newest_rise.seconds <= max(quiet_seconds, quiet_gaps * gap_seconds):
        return False
    return now.requests - newest_rise.requests >= quiet_gaps * gap_requests
