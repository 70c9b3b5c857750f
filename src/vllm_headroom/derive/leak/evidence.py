"""The witnesses of even growth: pace, shape, whether it is steady, and how long it lasted."""

from itertools import pairwise
from math import inf, log
from statistics import median
from typing import Final

from vllm_headroom.derive.leak.facts import RISE_BYTES, Block
from vllm_headroom.derive.leak.windows import WINDOW_BLOCKS, Growth, count_folds
from vllm_headroom.units import DAY_SECONDS, HOUR_SECONDS

STEADY_BLOCKS: Final = WINDOW_BLOCKS[2]
"""The least number of blocks, eleven, of steady growth: fewer may rise by the same by chance."""

STEADY_SPREAD: Final = 1.3
"""The highest mean square of steady rises, as a multiple of their squared mean: a variance of 0.3
squared means. At a warm-up the variance is 0.8 squared means and more."""


def is_steady(growth: Growth) -> bool:
    """Return whether every block of the window rose by nearly the same, in 11 or more blocks."""
    has_paused = growth.rise_count < len(growth.rises_bytes)
    if has_paused or growth.rise_count < STEADY_BLOCKS:
        return False
    return growth.typical_step_bytes * growth.rise_count <= STEADY_SPREAD * growth.grown_bytes


LEAST_REQUESTS: Final = 1e-3
"""A block without a finished request counts as this many, because the logarithm of 0 does not
exist."""


def weigh_pace(growth: Growth, origin: Block) -> float:
    """Return the log likelihood ratio of growth at a constant rate against growth by folds of work.

    Records and first uses come at a constant or falling rate per e-fold of work since `origin`; a
    leak comes at a constant rate by time or by requests. Both are Poisson processes of steps of one
    size. So each byte of growth adds the logarithm of the ratio of the two intensities at its
    block, and the sum over all bytes is divided by the size of a step. Under the hypothesis of a
    leak, the growth before the window may have had another pace by e-folds.
    """
    opened = growth.blocks[0]
    now = growth.blocks[-1]
    grown_bytes = growth.grown_bytes
    # The window was chosen so that it begins with a step. To make up for that choice, one step,
    # the largest, counts as growth before the window.
    before_bytes = max(0.0, growth.retained_bytes[0] - origin.floor_bytes)
    before_bytes += max(growth.rises_bytes)
    # Under the hypothesis of no leak, all growth before and within the window has one pace.
    bytes_per_fold = (before_bytes + grown_bytes) / count_folds(origin, origin, now)
    bytes_per_fold_before = before_bytes / count_folds(origin, origin, opened)
    odds_per_byte_before = log(bytes_per_fold_before / bytes_per_fold)
    least_odds = -inf
    if odds_per_byte_before >= 0:
        # Growth by e-folds has slowed down, as after a large warm-up. Then only the growth within
        # the window is compared, and it may not lower the odds.
        odds_per_byte_before = 0.0
        least_odds = 0.0
        bytes_per_fold = grown_bytes / count_folds(origin, opened, now)

    # The logarithm of the ratio of the two intensities has a part that is the same in all blocks,
    # and a part that depends on the block. Of the second part, the mean is taken, weighted by the
    # bytes of each block.
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
        # Each block has many steps. By Poisson's law, the size of one step is the variance of the
        # rises divided by their mean.
        step_bytes -= grown_bytes / growth.rise_count
    step_bytes = max(RISE_BYTES, step_bytes)
    odds = (before_bytes * odds_per_byte_before + grown_bytes * odds_per_byte) / step_bytes
    return max(least_odds, odds)


CLIP_MEDIANS: Final = 3.0
"""A rise counts as at most this many median rises: one large step must not make a trend."""


def clip_rises(growth: Growth, least_limit_bytes: float = 0.0) -> list[float]:
    """Return the rises, each clipped to `CLIP_MEDIANS` median rises.

    The clip is never below `least_limit_bytes`. At least one rise must reach RISE_BYTES.
    """
    median_bytes = median(rise for rise in growth.rises_bytes if rise >= RISE_BYTES)
    limit_bytes = max(least_limit_bytes, CLIP_MEDIANS * median_bytes)
    return [min(limit_bytes, rise_bytes) for rise_bytes in growth.rises_bytes]


LATER_HALF_SHARE: Final = 0.45
"""Our choice: the least share of the growth that the later half of a window must have, by time or
by requests."""

FIRST_QUARTER_SHARE: Final = 0.05
"""The least share of the first quarter: growth that began within the window is not even."""

LAST_QUARTER_SHARE: Final = 0.10
"""The least share of the last quarter: growth that ended within the window is not even."""


def is_even(growth: Growth) -> bool:
    """Return whether growth is spread over the window, by requests or by busy time.

    The later half and the first and last quarter must have their least shares, and the two other
    quarters must have some growth. The condition on the half and that on the quarters may hold by
    different axes.
    """
    clipped_bytes = clip_rises(growth)
    later_half_share = 0.0
    is_unceasing = False
    for axis in (
        [block.requests for block in growth.blocks],
        [block.busy_seconds for block in growth.blocks],
    ):
        if axis[-1] <= axis[0]:
            continue  # no request has finished, or the engine does not count them
        shares = _share_by_quarter(axis, clipped_bytes)
        later_half_share = max(later_half_share, shares[2] + shares[3])
        has_both_ends = shares[0] >= FIRST_QUARTER_SHARE and shares[3] >= LAST_QUARTER_SHARE
        if has_both_ends and min(shares[1:3]) > 0:
            is_unceasing = True
    return is_unceasing and later_half_share >= LATER_HALF_SHARE


def _share_by_quarter(axis: list[float], rises_bytes: list[float]) -> list[float]:
    """Return each quarter's share of the rises; a rise counts where the middle of its block is."""
    length = axis[-1] - axis[0]
    sum_bytes = sum(rises_bytes)
    shares = [0.0] * 4
    for (begin, end), rise_bytes in zip(pairwise(axis), rises_bytes, strict=True):
        # The middle is (begin + end) / 2. Its distance from the start, in quarters, is
        # 4 * (middle - start) / length.
        quarter = int(2 * (begin + end - 2 * axis[0]) / length)
        shares[min(3, quarter)] += rise_bytes / sum_bytes
    return shares


GROWING_SECONDS: Final = 600.0
"""Our choice: how long growth must have lasted for a warning."""

LEAKING_SECONDS: Final = HOUR_SECONDS
"""How long growth must usually have lasted for an alarm. Bounded ramps (caches, LoRA slots) are
linear until they end: only time distinguishes them from a leak."""

HASTE_SHARE: Final = 0.25
"""Where out-of-memory is near, growth must have lasted for this share of the time left only."""

HASTE_SECONDS: Final = 180.0
"""But growth must have lasted for at least this time."""

PATIENCE_SHARE: Final = 0.05
"""Where out-of-memory is far, growth must have lasted for this share of the time left:
out-of-memory in days is no reason to wake somebody, and slow ramps mostly end."""

LONGEST_PATIENCE_SECONDS: Final = DAY_SECONDS / 2
"""Growth need not have lasted longer than this."""


def compute_patience(left_seconds: float | None) -> float:
    """Return for how many seconds growth must have lasted for an alarm.

    `left_seconds` is the time until out-of-memory; where it is unknown, LEAKING_SECONDS is
    returned.
    """
    if left_seconds is None:
        return LEAKING_SECONDS
    patience_seconds = max(PATIENCE_SHARE * left_seconds, LEAKING_SECONDS)
    patience_seconds = min(patience_seconds, LONGEST_PATIENCE_SECONDS)
    # Where the device is soon full, a share of the time left is shorter than an hour.
    haste_seconds = max(HASTE_SHARE * left_seconds, HASTE_SECONDS)
    return min(haste_seconds, patience_seconds)
