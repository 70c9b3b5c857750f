"""The evidence for a leak: windows, witnesses of even growth, and large steps.

A witness is a single test of whether growth is a leak.
"""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate, pairwise
from math import inf, log
from statistics import median
from typing import Final, NamedTuple

from msgspec import Struct

from vllm_headroom.derive.leak.facts import (
    RISE_BYTES,
    Block,
    Certainty,
    Growth,
    MemoryStep,
    Ring,
    Track,
    find_retained,
)
from vllm_headroom.units import DAY_SECONDS, GIB, HOUR_SECONDS, MIB

WINDOW_BLOCKS: Final = (6, 8, 11, 15, 21, 30, 46, 61)
"""The lengths of the windows that are judged, in blocks."""

LEAST_GROWTH_BYTES: Final = 48 * MIB
"""The minimum growth for a verdict. Growth by a few segments of 20 MiB (c10 kLargeBuffer) is not a
leak.
"""

COUNTED_SECONDS: Final = 60.0
"""Work is counted as if it had begun this long before the origin. Without this offset, the work's
logarithm would be unbounded in the first block.
"""

COUNTED_REQUESTS: Final = 50.0
"""Work is counted as if this many requests had finished before the origin. This limits the
logarithm in the same way.
"""

LEAST_FOLDS: Final = 1e-9
"""A block without work is given this many e-folds. Callers divide by the number of e-folds. An
e-fold is an increase in the work by the factor e.
"""


def count_folds(origin: Block, begin: Block, end: Block) -> float:
    """Return by how many e-folds the work since the origin grew between `begin` and `end`.

    Work is measured in time or requests, whichever grew by more e-folds. The result is never 0.
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
"""The assumed number of independent sources of benign rises. One kind is records: demands larger
than all previous ones. The other kind is first uses of a kernel. Among exchangeable demands, the
n-th is a record with probability 1/n (Rényi). An event of log-uniform rarity first occurs at rate
1/n. While the work grows from n0 to n1, these sources therefore cause at most RISE_SOURCES times
ln(n1/n0) rises.
"""

RISE_CHANCE_IN_A_LEAK: Final = 0.8
"""Our choice: in a leak, memory rises in four out of five blocks."""

LEAST_RISE_CHANCE: Final = 0.10
"""The assumed chance of a benign rise in a block is at least this. Real benign steps occur in
clusters.
"""

USELESS_CHANCE: Final = 0.75
"""If a benign rise is at least this likely, the block is not evidence. This is the case during
warm-up.
"""


def weigh_blocks(origin: Block, blocks: tuple[Block, ...]) -> tuple[list[float], list[float]]:
    """Return what a rise in each block adds to the odds of a leak.

    The second list is what the absence of a rise adds. Entry i is for the rise from block i to
    block i + 1. The entries are log likelihood ratios of a leak versus benign rises. Benign rises
    are new maxima and first uses. A block is not evidence if the running requests reached a new
    maximum in it or in the previous block. The higher load explains a rise of memory in that block.
    The rise may only show in the floor of the next block.
    """
    odds_of_rise: list[float] = []
    odds_of_none: list[float] = []
    peak_running = origin.peak_running
    for previous, block in pairwise(blocks):
        benign_chance = max(RISE_SOURCES * count_folds(origin, previous, block), LEAST_RISE_CHANCE)
        if benign_chance < USELESS_CHANCE and block.peak_running <= peak_running:
            odds_of_rise.append(log(RISE_CHANCE_IN_A_LEAK / benign_chance))
            odds_of_none.append(log((1 - RISE_CHANCE_IN_A_LEAK) / (1 - benign_chance)))
        else:  # The block is not evidence, no matter whether memory rises in it.
            odds_of_rise.append(0.0)
            odds_of_none.append(0.0)
        # The peak is taken one block late. A rise after a new load peak shows in the next block's
        # floor.
        peak_running = previous.peak_running
    return odds_of_rise, odds_of_none


class RingSurvey(Struct, frozen=True):
    """A ring's blocks since the origin, and the figures that their windows share."""

    blocks: tuple[Block, ...]
    retained_bytes: tuple[float, ...]
    """Each block's retained memory: the lowest floor in that block and all later ones."""

    highest_bytes: tuple[float, ...]
    """The highest floor up to each block, including blocks before the origin."""

    odds_of_rise: tuple[float, ...]
    """What a rise from block i to i + 1 adds to the odds. See `weigh_blocks`."""

    odds_of_none: tuple[float, ...]
    """What the absence of a rise adds to the odds."""


def survey_ring(ring: Ring, origin: Block) -> RingSurvey | None:
    """Return a ring's blocks since the origin.

    Returns None if there are too few blocks for a verdict, or too little growth.
    """
    oldest = bisect_left(ring.blocks, origin.seconds, key=lambda block: block.seconds)
    # A window needs one more block: the preceding one, with which it is compared.
    if len(ring.blocks) - oldest < WINDOW_BLOCKS[0] + 1:
        return None
    retained_bytes = find_retained(ring.blocks)
    floors = (block.floor_bytes for block in ring.blocks)
    # `initial` adds an entry before the first block; the slice removes this entry.
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
    """Return the growth from the block at `begin` to the newest block.

    The caller ensures that memory has grown.
    """
    # Growth is measured from the highest floor. Memory that merely returns to an earlier height has
    # not grown.
    held_before_bytes = survey.highest_bytes[begin]
    retained_bytes = tuple(
        max(held_before_bytes, floor_bytes) for floor_bytes in survey.retained_bytes[begin:]
    )
    rises_bytes = tuple([later - earlier for earlier, later in pairwise(retained_bytes)])
    grown_bytes = retained_bytes[-1] - retained_bytes[0]
    rising = [rise_bytes for rise_bytes in rises_bytes if rise_bytes >= RISE_BYTES]
    # Squaring gives large rises more weight, so many small rises hardly reduce the typical step.
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


LAST_SHARE: Final = 0.05
"""The last part of a window's growth is this share of the growth. How long ago the last part was
added shows whether growth has ended.
"""

QUIET_SECONDS: Final = 1800.0
"""Growth has ended only if memory has not risen for at least this long."""

QUIET_GAPS: Final = 1.5
"""Growth has ended only after this many usual gaps without a rise. Gaps are measured both in
seconds and in requests.
"""


def has_ended(growth: Growth) -> bool:
    """Return whether memory has not risen for so long that growth has ended (see `is_over`).

    The quiet time starts when 95 % of the growth has been reached. A small rise at the end
    therefore does not restart it. At an even pace, 5 % of the growth would take a certain time. The
    quiet time must be at least twice that time.
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
    """Return whether memory has not risen since `newest_rise` for so long that growth is over.

    The time must exceed both `quiet_seconds` and `quiet_gaps` times the usual gap between steps.
    The usual gap is computed from `step_count`, the number of steps since `began`. The condition on
    gaps must also hold when gaps are measured in requests. Idle time therefore does not end growth.
    """
    # There are n - 1 gaps between n steps.
    gap_count = max(1.0, step_count - 1)
    gap_seconds = (newest_rise.seconds - began.seconds) / gap_count
    gap_requests = (newest_rise.requests - began.requests) / gap_count
    if now.seconds - newest_rise.seconds <= max(quiet_seconds, quiet_gaps * gap_seconds):
        return False
    return now.requests - newest_rise.requests >= quiet_gaps * gap_requests


STEADY_BLOCKS: Final = WINDOW_BLOCKS[2]
"""The minimum number of blocks of steady growth: eleven. With fewer blocks, the rises may be equal
by chance.
"""

STEADY_SPREAD: Final = 1.3
"""Rises are steady up to this ratio of their mean square to their squared mean. This allows a
variance of 0.3 times the squared mean. During a warm-up, the variance is at least 0.8 times the
squared mean.
"""


def is_steady(growth: Growth) -> bool:
    """Return whether the window has at least 11 blocks, all with nearly the same rise."""
    has_paused = growth.rise_count < len(growth.rises_bytes)
    if has_paused or growth.rise_count < STEADY_BLOCKS:
        return False
    return growth.typical_step_bytes * growth.rise_count <= STEADY_SPREAD * growth.grown_bytes


STRAIGHT_SPREAD: Final = 1.1
"""Rises are straight up to this ratio of their mean square to their squared mean. This limit is
lower than STEADY_SPREAD. Fewer than eleven blocks are judged, and they may be alike by chance.
"""

STRAIGHT_BYTES: Final = 512 * MIB
"""The growth along a straight line must be at least this many bytes. With less growth, each rise
may be one segment. The first use of a kernel or a batch size takes one segment.
"""


def is_straight(growth: Growth) -> bool:
    """Return whether all blocks rose by nearly the same amount, without slowing down.

    A window has at least six blocks. A straight line is therefore recognised after three minutes.
    Memory that follows load would rise more and more slowly.
    """
    if growth.rise_count < len(growth.rises_bytes):
        return False
    # Memory that follows load slows down. The later half of the window contains less than half of
    # the growth.
    later_bytes = sum(growth.rises_bytes[len(growth.rises_bytes) // 2 :])
    if later_bytes < LATER_HALF_SHARE * growth.grown_bytes:
        return False
    return growth.typical_step_bytes * growth.rise_count <= STRAIGHT_SPREAD * growth.grown_bytes


LEAST_REQUESTS: Final = 1e-3
"""A block without a finished request is given this many requests. The logarithm of 0 is undefined.
"""


def weigh_pace(growth: Growth, origin: Block) -> float:
    """Return the log likelihood ratio of constant growth versus growth by e-folds of work.

    Benign rises occur at a constant or falling rate per e-fold of work since `origin`. A leak grows
    at a constant rate per second or per request. Leaks and benign rises are modelled as Poisson
    processes whose steps have the same size. Each byte of growth adds the log ratio of the two
    intensities in its block. The sum of these log ratios is divided by the step size. In a leak,
    the pace by e-folds may have been different before the window.
    """
    opened = growth.blocks[0]
    now = growth.blocks[-1]
    grown_bytes = growth.grown_bytes
    # The window was chosen so that it begins with a step. To compensate for that choice, its
    # largest step is treated as growth before the window.
    before_bytes = max(0.0, growth.retained_bytes[0] - origin.floor_bytes)
    before_bytes += max(growth.rises_bytes)
    # Without a leak, growth before the window has the same pace as growth within it.
    bytes_per_fold = (before_bytes + grown_bytes) / count_folds(origin, origin, now)
    bytes_per_fold_before = before_bytes / count_folds(origin, origin, opened)
    odds_per_byte_before = log(bytes_per_fold_before / bytes_per_fold)
    least_odds = -inf
    if odds_per_byte_before >= 0:
        # Growth per e-fold is slower within the window than before, as after a large warm-up. In
        # that case, only the growth within the window is compared. The earlier growth must not
        # lower the odds.
        odds_per_byte_before = 0.0
        least_odds = 0.0
        bytes_per_fold = grown_bytes / count_folds(origin, opened, now)

    # One part of the logarithm is the same in all blocks, another part differs. The part that
    # differs is averaged over the blocks, weighted by their bytes.
    seconds_by_folds = 0.0
    requests_by_folds = 0.0
    for (previous, block), rise_bytes in zip(
        pairwise(growth.blocks), growth.rises_bytes, strict=True
    ):
        if rise_bytes > 0:
            folds = count_folds(origin, previous, block)
            seconds_by_folds += rise_bytes * log((block.seconds - previous.seconds) / folds)
            requests = max(block.requests - previous.requests, LEAST_REQUESTS)
            requests_by_folds += rise_bytes * log(requests / folds)
    odds_per_byte = (
        log(grown_bytes / growth.lasted_seconds / bytes_per_fold) + seconds_by_folds / grown_bytes
    )
    window_requests = now.requests - opened.requests
    if window_requests > 0:
        odds_per_byte_by_requests = (
            log(grown_bytes / window_requests / bytes_per_fold) + requests_by_folds / grown_bytes
        )
        odds_per_byte = max(odds_per_byte, odds_per_byte_by_requests)

    step_bytes = growth.typical_step_bytes
    if is_steady(growth):
        # Each block contains many steps. By Poisson's law, the step size is the rises' variance
        # divided by their mean.
        step_bytes -= grown_bytes / growth.rise_count
    step_bytes = max(RISE_BYTES, step_bytes)
    odds = (before_bytes * odds_per_byte_before + grown_bytes * odds_per_byte) / step_bytes
    return max(least_odds, odds)


CLIP_MEDIANS: Final = 3.0
"""A rise is clipped to this many median rises. With this limit, a single large step does not look
like a trend.
"""


def clip_rises(growth: Growth, least_limit_bytes: float = 0.0) -> list[float]:
    """Return the rises, each clipped to `CLIP_MEDIANS` median rises.

    The limit is at least `least_limit_bytes`. At least one rise must reach RISE_BYTES.
    """
    median_bytes = median(rise for rise in growth.rises_bytes if rise >= RISE_BYTES)
    limit_bytes = max(least_limit_bytes, CLIP_MEDIANS * median_bytes)
    return [min(limit_bytes, rise_bytes) for rise_bytes in growth.rises_bytes]


LATER_HALF_SHARE: Final = 0.45
"""Our choice: the later half of a window must contain this share of its growth. Halves are by time
or by requests.
"""

FIRST_QUARTER_SHARE: Final = 0.05
"""The first quarter must contain at least this share of the growth. If it contains less, growth
began within the window, so it is uneven.
"""

LAST_QUARTER_SHARE: Final = 0.10
"""The last quarter must contain at least this share of the growth. If it contains less, growth
ended within the window, so it is uneven.
"""


def is_even(growth: Growth) -> bool:
    """Return whether growth is spread over the window, by requests or by busy time.

    The later half, the first and the last quarter each need a minimum share. Each of the two middle
    quarters must have some growth. The half and the quarters may meet their conditions on different
    axes.
    """
    clipped_bytes = clip_rises(growth)
    later_half_share = 0.0
    is_unceasing = False
    for axis in (
        [block.requests for block in growth.blocks],
        [block.busy_seconds for block in growth.blocks],
    ):
        if axis[-1] <= axis[0]:
            continue  # No request has finished, or the engine does not count requests.
        shares = _share_by_quarter(axis, clipped_bytes)
        later_half_share = max(later_half_share, shares[2] + shares[3])
        has_both_ends = shares[0] >= FIRST_QUARTER_SHARE and shares[3] >= LAST_QUARTER_SHARE
        if has_both_ends and min(shares[1:3]) > 0:
            is_unceasing = True
    return is_unceasing and later_half_share >= LATER_HALF_SHARE


def _share_by_quarter(axis: list[float], rises_bytes: list[float]) -> list[float]:
    """Return each quarter's share of the rises.

    A rise is added to the quarter that contains the middle of its block.
    """
    length = axis[-1] - axis[0]
    sum_bytes = sum(rises_bytes)
    shares = [0.0] * 4
    for (begin, end), rise_bytes in zip(pairwise(axis), rises_bytes, strict=True):
        # The middle is (begin + end) / 2. The distance of the middle from the start, in quarters,
        # is 4 * (middle - start) / length.
        quarter = int(2 * (begin + end - 2 * axis[0]) / length)
        shares[min(3, quarter)] += rise_bytes / sum_bytes
    return shares


GROWING_SECONDS: Final = 600.0
"""Our choice: a warning requires growth that has lasted for this time."""

LEAKING_SECONDS: Final = HOUR_SECONDS
"""An alarm usually requires growth that has lasted for this time. Caches and LoRA slots fill as
evenly as a leak. Only time shows that they stop at a bound.
"""

HASTE_SHARE: Final = 0.25
"""If out-of-memory is near, straight growth needs to last only this share of the time until then.
"""

HASTE_SECONDS: Final = 180.0
"""If out-of-memory is near, growth must have lasted for at least this time."""

PATIENCE_SHARE: Final = 0.05
"""If out-of-memory is far away, straight growth must last for this share of the time until then.
Nobody needs to be paged days before out-of-memory. Most slow fills end.
"""

UNEVEN_PATIENCE_SHARE: Final = 0.36
"""Growth that is not straight must have lasted for this share of the time until memory is full.
Growth toward a bound, like 1 - exp(-t / tau), never lasts that long. Its maximum is 1/e (0.37),
unless the bound is as large as the room.
"""

LONGEST_PATIENCE_SECONDS: Final = DAY_SECONDS / 2
"""To raise an alarm, growth never needs to have lasted for longer than this."""


ASSUMED_ROOM_BYTES: Final = 16 * GIB
"""Our choice: the free memory that is assumed for a host whose limit is unknown. A server with a
GPU has more memory, but not all of it is free.
"""

UNKNOWN_PATIENCE_SECONDS: Final = DAY_SECONDS / 4
"""Our choice: if the room is unknown, no alarm requires longer growth than this. In a run's first
hours, caches, heaps and warm-ups also grow evenly.
"""


def compute_patience(left_seconds: float, *, is_room_known: bool, is_straight: bool) -> float:
    """Return for how many seconds growth must have lasted to raise an alarm.

    If the room is unknown, an amount of room is assumed. In that case, `left_seconds` is the time
    in which growth would fill the assumed room. With an assumed room, an alarm is raised within
    hours only if growth would fill it soon.
    """
    longest_seconds = LONGEST_PATIENCE_SECONDS if is_room_known else UNKNOWN_PATIENCE_SECONDS
    if not is_straight:
        uneven_seconds = max(UNEVEN_PATIENCE_SHARE * left_seconds, HASTE_SECONDS)
        return min(uneven_seconds, longest_seconds)
    # If the device will soon be full, this is shorter than LEAKING_SECONDS.
    haste_seconds = max(HASTE_SHARE * left_seconds, HASTE_SECONDS)
    if is_room_known:
        patience_seconds = max(PATIENCE_SHARE * left_seconds, LEAKING_SECONDS)
        haste_seconds = min(haste_seconds, patience_seconds)
    return min(haste_seconds, longest_seconds)


LINE_DEVIATION: Final = 0.08
"""Our choice: growth is straight if it stays this close to a straight line. The limit is for the
deviation of its share. The share of n random rises deviates by about 0.87 / sqrt(n). This is 0.19
for 21 rises. A fill like 1 - exp(-t / tau) deviates by about t / (8 tau).
"""


def measure_deviation(growth: Growth) -> float:
    """Return how far the growth deviates from a straight line, by time or by requests.

    The deviation is Kolmogorov's distance, between 0 and 1. The distance is measured on both axes,
    and the smaller one is used. The rises are clipped. A single large demand does not change the
    shape of a leak.
    """
    rises_bytes = clip_rises(growth)
    sum_bytes = sum(rises_bytes)
    grown_shares = [grown_bytes / sum_bytes for grown_bytes in accumulate(rises_bytes)]
    deviations = [1.0]
    for axis in (
        [block.seconds for block in growth.blocks],
        [block.requests for block in growth.blocks],
    ):
        length = axis[-1] - axis[0]
        if length > 0:
            points = zip(axis[1:], grown_shares, strict=True)
            deviations.append(max([abs(share - (at - axis[0]) / length) for at, share in points]))
    return min(deviations)


def has_lasted(growth: Growth, left_seconds: float, *, is_room_known: bool) -> bool:
    """Return whether growth has lasted long enough to raise an alarm (see `compute_patience`)."""

    def find_patience(*, is_straight: bool) -> float:
        return compute_patience(left_seconds, is_room_known=is_room_known, is_straight=is_straight)

    if growth.lasted_seconds >= find_patience(is_straight=False):
        return True
    # The deviation is measured last, because measuring it reads all blocks.
    return (
        growth.lasted_seconds >= find_patience(is_straight=True)
        and measure_deviation(growth) <= LINE_DEVIATION
    )


LEAST_STEPS_BYTES: Final = 512 * MIB
"""A window is judged by its large steps only from this much growth."""

LEAST_STEPS: Final = 1.8
"""A window's growth must be at least this many times its typical step. A single step says nothing
about the pace.
"""


def find_step_windows(survey: RingSurvey) -> Iterator[Growth]:
    """Yield each window that begins with a rise and grew by two large steps.

    The shortest window comes first. A rise in a block with a new peak in load is not counted. The
    load explains that rise. Nothing is yielded if no window has enough growth.
    """
    # The loop starts at the newest block, so that shorter windows come first.
    for begin in range(len(survey.blocks) - 2, -1, -1):
        begins_with_step = survey.retained_bytes[begin + 1] > survey.retained_bytes[begin]
        grown_bytes = survey.retained_bytes[-1] - survey.highest_bytes[begin]
        if begins_with_step and grown_bytes >= LEAST_STEPS_BYTES:
            growth = cut_window(survey, begin)
            if _sum_at_level_load(growth) >= LEAST_STEPS * growth.typical_step_bytes:
                yield growth


def _sum_at_level_load(growth: Growth) -> float:
    """Return the total bytes of rises in blocks without a new peak in load."""
    rises = zip(pairwise(growth.blocks), growth.rises_bytes, strict=True)
    return sum(
        [
            rise_bytes
            for (previous, block), rise_bytes in rises
            if block.peak_running <= previous.peak_running
        ]
    )


SAME_SIZE_BYTES: Final = 2 * MIB
"""Steps have the same size if they differ by at most this much, the smallest step of the allocator.
"""

RECORD_RATIO: Final = 1.04
"""A step is a record if it exceeds all previous steps by this ratio."""

REPEATED_BYTES: Final = 96 * MIB
"""Repeated steps below this size are not evidence. Slots, graphs and kernels also come in equal,
smaller steps.
"""

REPEATED_ODDS: Final = 2.0
"""A repeated step size adds this to the log odds for each e-fold. The e-folds are counted from
`REPEATED_BYTES`. This constant and the next three are fitted to simulated days.
"""

MOST_REPEATED_ODDS: Final = 6.0
"""The most that a step whose size is repeated adds to the log odds."""

SMALLER_ODDS: Final = 0.5
"""What a step smaller than the largest previous step adds to the log odds."""

RECORD_ODDS: Final = -1.0
"""What a step larger than all previous steps adds to the log odds."""


def score_likeness(
    steps: tuple[MemoryStep, ...], since_seconds: float, least_bytes: float
) -> float:
    """Return the log likelihood ratio of a leak, judged by the sizes of the steps.

    Benign steps are records: each is larger than all previous steps. The allocator takes a new
    segment only for a demand that fits no cached segment. The steps of a leak are of the same kind
    and size. Only steps of at least `least_bytes` are compared. Only steps after `since_seconds`
    add to the result.
    """
    odds = 0.0
    earlier_bytes: list[float] = []
    for step in steps:
        if step.size_bytes < least_bytes:
            continue
        if step.seconds > since_seconds:
            odds += _weigh_size(step.size_bytes, earlier_bytes)
        earlier_bytes.append(step.size_bytes)
    return odds


def _weigh_size(size_bytes: float, earlier_bytes: list[float]) -> float:
    """Return what a step's size adds to the log odds.

    The result is 0 if the size is not evidence.
    """
    largest_bytes = max(earlier_bytes, default=0.0)
    if size_bytes <= largest_bytes:  # A record does not repeat any earlier size.
        for other_bytes in earlier_bytes:
            if abs(size_bytes - other_bytes) <= SAME_SIZE_BYTES:
                folds = log(size_bytes / REPEATED_BYTES)
                return min(MOST_REPEATED_ODDS, max(0.0, REPEATED_ODDS * folds))
    if size_bytes < largest_bytes:
        return SMALLER_ODDS
    if size_bytes > RECORD_RATIO * largest_bytes:
        return RECORD_ODDS
    return 0.0


GROWING_ODDS: Final = log(12)
"""A warning requires at least these log odds from the pace. Memory must grow with time or requests
rather than e-folds, at twelve to one.
"""

LEAKING_ODDS: Final = log(8)
"""An alarm requires at least these log odds from the pace. Eight to one is sufficient if the step
sizes are those of a leak.
"""

SURE_OF_STEPS: Final = 9.0
"""An alarm requires at least these log odds from pace and step sizes together."""

LEAKING_ODDS_WHERE_FULL: Final = log(3)
"""Replaces LEAKING_ODDS if another step as large as the largest one would not fit. Bounded growth
rarely fills memory that far.
"""

SURE_OF_STEPS_WHERE_FULL: Final = 6.0
"""Replaces SURE_OF_STEPS if another step as large as the largest one would not fit."""

LEAST_REPEATS: Final = 3
"""Our choice: after this many steps of the same size, another one is expected."""

REPEATED_RATIO: Final = 1.05
"""Steps of one kind differ in size by less than this ratio. A 20 MiB segment is 4 % of the smallest
step that is considered.
"""


JOINED_SECONDS: Final = QUIET_SECONDS
"""Rises within this time are joined into a single step. A large buffer is taken in several
segments.
"""

REALLOCATED_SECONDS: Final = 120.0
"""For a buffer that doubles, rises within this time are joined into a single step. The time is
short. A small buffer is copied immediately and doubles again within minutes.
"""


class NextStep(NamedTuple):
    """The next large step that is expected.

    Times are on the track's clock.
    """

    size_bytes: float
    first_seconds: float
    """The time of the first step on which the prediction is based."""
    earliest_seconds: float
    likely_seconds: float


def find_next_step(steps: tuple[MemoryStep, ...]) -> NextStep | None:
    """Return the next step if steps repeat or double in size.

    Returns None if no step is expected.
    """
    return _find_repeated_step(steps) or _find_doubled_step(steps)


def _find_repeated_step(steps: tuple[MemoryStep, ...]) -> NextStep | None:
    """Return the next step if large steps of one size repeat.

    The step is expected once the shortest interval so far has passed again. Returns None if fewer
    than LEAST_REPEATS steps are as large as the newest one. Also returns None if the newest step is
    below LEAST_STEPS_BYTES.
    """
    large_steps = [
        step for step in _join_steps(steps, JOINED_SECONDS) if step.size_bytes >= LEAST_STEPS_BYTES
    ]
    if not large_steps:
        return None
    # The next step is expected to be as large as the newest one.
    newest = large_steps[-1]
    repeated = [step for step in large_steps if _is_alike(step.size_bytes, newest.size_bytes)]
    if len(repeated) < LEAST_REPEATS:
        return None
    interval_seconds = min(later.seconds - step.seconds for step, later in pairwise(repeated))
    next_seconds = newest.seconds + interval_seconds
    return NextStep(newest.size_bytes, repeated[0].seconds, next_seconds, next_seconds)


def _find_doubled_step(steps: tuple[MemoryStep, ...]) -> NextStep | None:
    """Return the next step if a buffer keeps doubling.

    The next step is expected after twice the interval between the last two steps. A list, a hash
    table or a growing buffer doubles whenever it is full. After each doubling, the next one takes
    about twice as long. Returns None if the latest three steps do not double, or if the latest step
    is below LEAST_STEPS_BYTES.
    """
    joined_steps = _join_steps(steps, REALLOCATED_SECONDS)
    if not joined_steps or joined_steps[-1].size_bytes < LEAST_STEPS_BYTES:
        return None
    newest = joined_steps[-1]
    least_bytes = newest.size_bytes / 4 / REPEATED_RATIO
    large_steps = [step for step in joined_steps if step.size_bytes >= least_bytes]
    if len(large_steps) < LEAST_REPEATS:
        return None
    first, second, _ = large_steps[-LEAST_REPEATS:]
    has_doubled = _is_alike(2 * first.size_bytes, second.size_bytes)
    if not has_doubled or not _is_alike(2 * second.size_bytes, newest.size_bytes):
        return None
    earlier_seconds = second.seconds - first.seconds
    interval_seconds = newest.seconds - second.seconds
    # The interval between the steps must be about twice as long as the previous one. A factor of
    # two is allowed, because load may change.
    if not earlier_seconds < interval_seconds < 4 * earlier_seconds:
        return None
    return NextStep(
        2 * newest.size_bytes,
        first.seconds,
        # The earliest time assumes that the request rate doubles.
        newest.seconds + interval_seconds,
        newest.seconds + 2 * interval_seconds,
    )


def _is_alike(size_bytes: float, other_bytes: float) -> bool:
    return other_bytes / REPEATED_RATIO <= size_bytes <= other_bytes * REPEATED_RATIO


def _join_steps(steps: tuple[MemoryStep, ...], apart_seconds: float) -> list[MemoryStep]:
    """Return the steps, joining those that are close together.

    Steps that are at most `apart_seconds` apart become a single step.
    """
    joined_steps: list[MemoryStep] = []
    newest_seconds = -inf
    for step in steps:
        if step.seconds - newest_seconds <= apart_seconds:
            # Both steps are segments of the same demand. The joined step has the first step's time
            # and the last step's height.
            size_bytes = joined_steps[-1].size_bytes + step.size_bytes
            joined_steps[-1] = MemoryStep(joined_steps[-1].seconds, size_bytes, step.top_bytes)
        else:
            joined_steps.append(step)
        newest_seconds = step.seconds
    return joined_steps


COMPARED_SHARE: Final = 0.05
"""A step smaller than this share of the growth is not compared with other steps."""

YOUNG_SECONDS: Final = 4 * HOUR_SECONDS
"""Caches also fill evenly. Therefore, no alarm is raised until this time has passed since the
origin. No warning is raised until half of this time has passed.
"""

LATE_SHARE: Final = 2.0
"""Growth that has lasted this many times as long as the time until memory is full raises an alarm
earlier. This applies at any load. By then, two thirds of the room are gone.
"""

ROOM_SHARE: Final = 0.25
"""For an alarm, growth must have taken this share of the room or ENOUGH_BYTES. The smaller amount
is sufficient.
"""

ENOUGH_BYTES: Final = 1536 * MIB
"""Few caches are as large as this."""

WARNING_SHARE: Final = 0.25
"""A warning requires growth that has lasted for this share of the time until memory is full."""


def judge_steps(
    growth: Growth, track: Track, origin: Block, room_bytes: float | None
) -> tuple[Certainty, float]:
    """Return the verdict on a window that begins with a step, and its log odds.

    GROWING requires that growth does not slow down. The device must be expected to be full within a
    day. GROWING also requires that growth has lasted for a quarter of the time until the device is
    full. LEAKING additionally requires that step sizes repeat. Growth must also have used enough of
    the room. An unknown room is assumed to be as large as the initially held memory.
    """
    odds = weigh_pace(growth, origin)
    grown_bytes = growth.grown_bytes
    lasted_seconds = growth.lasted_seconds
    age_seconds = track.clock.now_seconds - origin.seconds
    # If the room is unknown, memory is assumed to be full when it has doubled.
    assumed_room_bytes = origin.floor_bytes if room_bytes is None else max(1.0, room_bytes)
    left_seconds = assumed_room_bytes / grown_bytes * lasted_seconds

    # Caches also fill in steps. Few caches become that large, and most fill early in a run.
    enough_bytes = min(ENOUGH_BYTES, ROOM_SHARE * (assumed_room_bytes + grown_bytes))
    # In the first hour, the engine holds large temporary buffers that it will release later.
    is_late = room_bytes is not None and lasted_seconds >= LATE_SHARE * left_seconds
    is_late = is_late and age_seconds >= LEAKING_SECONDS
    # Less evidence is sufficient if another step of the largest size would not fit. Bounded growth
    # rarely fills memory that far.
    is_full = room_bytes is not None and assumed_room_bytes <= max(growth.rises_bytes)
    leaking_odds = LEAKING_ODDS
    sure_odds = SURE_OF_STEPS
    if is_full:
        leaking_odds = LEAKING_ODDS_WHERE_FULL
        sure_odds = SURE_OF_STEPS_WHERE_FULL
    may_be_leak = odds >= leaking_odds and grown_bytes >= enough_bytes
    # A few steps never form a straight line. The likeness of their sizes is scored instead.
    patience_seconds = compute_patience(
        left_seconds, is_room_known=room_bytes is not None, is_straight=True
    )
    may_be_leak = may_be_leak and lasted_seconds >= patience_seconds
    if may_be_leak and (age_seconds >= YOUNG_SECONDS or is_late):
        # The likeness is scored last, because scoring compares all pairs of steps.
        steps = tuple(step for step in track.history.steps if step.seconds > origin.seconds)
        likeness = score_likeness(steps, growth.blocks[0].seconds, COMPARED_SHARE * grown_bytes)
        if odds + likeness >= sure_odds:
            return Certainty.LEAKING, odds + likeness

    # A warning requires only this pace and a device that is full within a day.
    is_soon = left_seconds <= DAY_SECONDS and lasted_seconds >= WARNING_SHARE * left_seconds
    if odds >= GROWING_ODDS and age_seconds >= YOUNG_SECONDS / 2 and is_soon:
        return Certainty.GROWING, odds
    return Certainty.NONE, odds
