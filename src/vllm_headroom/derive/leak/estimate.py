"""How fast memory grows, and when the device will be full."""

from bisect import bisect_right
from itertools import combinations, pairwise
from math import inf, sqrt
from statistics import fmean, median, stdev
from typing import Final, NamedTuple

from msgspec.structs import replace

from vllm_headroom.derive.leak.facts import (
    LARGE_BYTES,
    OUT_OF_MEMORY_BYTES,
    Estimate,
    Growth,
    Stretch,
    Track,
    list_falls,
)
from vllm_headroom.derive.leak.growth_evidence import (
    CLIP_MEDIANS,
    QUIET_SECONDS,
    RISE_CHANCE_IN_A_LEAK,
    find_next_step,
)
from vllm_headroom.units import DAY_SECONDS, HOUR_SECONDS

BATCHES: Final = 5
"""Our choice: growth is divided into this many batches. The 95 % interval of its rate is computed
from them.
"""

T_95: Final = 2.776
"""Student's t for a 95 % interval. The distribution has 4 degrees of freedom, one less than the
number of batches.
"""

STANDARD_ERRORS_95: Final = 2.0
"""The number of standard errors on each side of a 95 % interval."""

SLOPE_POINTS: Final = 16
"""A slope is computed from about this many blocks. The cost grows with the square of the number of
blocks. More blocks did not yield better rates.
"""

UNLIKE: Final = 1.4
"""Growth is attributed to requests if the batches' rates per request vary little. The limit is this
many times the variation of the rates per second.
"""

UNSEEN_SHARE: Final = 0.6
"""Load has a daily cycle. Until a whole day has been observed, load may still exceed its observed
peak. At a higher peak, memory may be full after this share of the estimated time.
"""

PEAK_MARGIN: Final = 1.1
"""Our choice: the request rate may rise to this many times the highest forecast."""

SHORTEST_MEAN_SECONDS: Final = 900.0
"""A mean rate is taken over at least this time. Over less time, the average of the last few minutes
is as good.
"""

DILUTED_RATIO: Final = 1.5
"""Our choice: a stretch is used from this many times the overall rate. In an even leak, the rates
of any two parts differ by less.
"""

MARGIN_SECONDS: Final = 300.0
"""This time is subtracted from the lower bound of the time until memory is full, for two reasons:

- An estimate is made only every two minutes.
- A peak of a few minutes does not show in a block's floor.
"""


MOST_MARGIN_SHARE: Final = 0.25
"""Our choice: at most this share of the time until the next peak is subtracted. Fast growth is
judged every 30 s, so a smaller margin is sufficient.
"""


class Slope(NamedTuple):
    """The slope of memory: bytes per second or bytes per request."""

    rate: float
    half_width: float
    """Half the width of the 95 % interval."""

    spread: float
    """The standard deviation of the batches as a multiple of their mean. The spread is inf if there
    are too few batches.
    """


def estimate_growth(
    growth: Growth, *, began_bytes: float, track: Track, room_bytes: float | None
) -> Estimate:
    """Return the rates of the growth, and the rates expected under future load (`pace`).

    The estimate does not yet include the time until memory is full; `set_time_left` adds it.
    `began_bytes` is the memory that was held when the growth began. If `room_bytes` is None, the
    room is unknown. In that case, the expected rates equal the rates per second.
    """
    seconds = [block.seconds for block in growth.blocks]
    requests = [block.requests for block in growth.blocks]
    median_rise_bytes = median(rise for rise in growth.rises_bytes if rise > 0)
    step_bytes = min(LARGE_BYTES, median_rise_bytes)
    retained_bytes = clip_largest_rise(growth, median_rise_bytes)
    by_time = measure_slope(seconds, retained_bytes, step_bytes)
    by_request = measure_slope(requests, retained_bytes, step_bytes)
    # If a leak grows in nearly every block, its rate varies only by chance. Batches of two or three
    # blocks each would exaggerate this variation.
    if growth.rise_count >= RISE_CHANCE_IN_A_LEAK * len(growth.rises_bytes):
        by_time = _limit_half_width(by_time, growth)
        by_request = _limit_half_width(by_request, growth)
    has_rates = by_request.rate > 0 and track.work.requests_per_second > 0
    # On the axis of the true cause, the batches differ less. If a leak grows with requests, its
    # growth per second varies with load.
    by_requests = has_rates and by_request.spread <= UNLIKE * by_time.spread

    pace = by_time.rate
    fastest = by_time.rate + by_time.half_width if by_time.rate > 0 else 0.0
    # A leak driven by requests depends on future load, not on past load.
    if room_bytes is not None and by_requests:
        usable_bytes = max(0.0, room_bytes - OUT_OF_MEMORY_BYTES)
        horizon_seconds = usable_bytes / (by_request.rate * track.work.requests_per_second)
        pace = by_request.rate * forecast_rate(track, horizon_seconds)
        # Memory runs out at peak load, not at average load.
        highest_rate = max(
            forecast_rate(track, HOUR_SECONDS),  # The load of the last hour may continue.
            forecast_rate(track, horizon_seconds / 4),
            forecast_rate(track, horizon_seconds),
        )
        fastest = PEAK_MARGIN * highest_rate * (by_request.rate + by_request.half_width)
    if room_bytes is not None and not _is_load_known(track, by_requests=by_requests):
        # Load hardly changes within a short time. The rate is therefore raised only if the room
        # lasts long enough. The room must last for more than half of the observed time.
        now_seconds = track.clock.now_seconds
        if fastest * now_seconds / 2 < room_bytes:
            fastest /= UNSEEN_SHARE

    return Estimate(
        bytes_per_second=by_time.rate,
        # A leak never releases memory, so its interval does not extend below zero.
        lower=max(min(0.0, by_time.rate), by_time.rate - by_time.half_width),
        upper=by_time.rate + by_time.half_width,
        bytes_per_request=by_request.rate if requests[-1] > requests[0] else None,
        by_requests=by_requests,
        leaked_bytes=max(growth.grown_bytes, growth.blocks[-1].floor_bytes - began_bytes),
        pace=pace if pace > 0 else None,
        fastest=fastest if fastest > 0 else None,
    )


def clip_largest_rise(growth: Growth, median_rise_bytes: float) -> tuple[float, ...]:
    """Return the retained memory of the growth with its largest rise clipped.

    Clipping keeps a single large demand from shortening the estimated time until memory is full.
    The limit is the largest of the second largest rise, three median rises and LARGE_BYTES. Steps
    that repeat are therefore not clipped.
    """
    *_, second_bytes, largest_bytes = sorted(growth.rises_bytes)
    limit_bytes = max(second_bytes, CLIP_MEDIANS * median_rise_bytes, LARGE_BYTES)
    if largest_bytes <= limit_bytes:
        return growth.retained_bytes
    rise_number = growth.rises_bytes.index(largest_bytes)
    earlier_bytes = growth.retained_bytes[: rise_number + 1]
    later_bytes = growth.retained_bytes[rise_number + 1 :]
    excess_bytes = largest_bytes - limit_bytes
    return (*earlier_bytes, *(retained - excess_bytes for retained in later_bytes))


def apply_stretch(estimate: Estimate, track: Track, room_bytes: float | None) -> Estimate:
    """Return the estimate with the rate of the newest stretch if that is higher.

    The rate of the growth as a whole may be too low, because it includes pauses and releases. If
    the stretch will not fill the room, the estimate uses a mean rate. The mean covers the time
    since the alarm's growth began, including pauses. The highest plausible rate assumes that the
    stretch does not end.
    """
    if track.alarm is None or track.alarm.stretch is None:
        return estimate
    stretch = track.alarm.stretch
    began = track.alarm.began
    fastest = max(estimate.fastest or 0.0, stretch.bytes_per_second)
    estimate = replace(estimate, fastest=fastest)
    grown_bytes = (track.history.held_bytes or began.floor_bytes) - began.floor_bytes
    pace = grown_bytes / max(1.0, track.clock.now_seconds - began.seconds)
    # Over a period that includes pauses, growth is no faster than in its newest stretch.
    pace = min(pace, stretch.bytes_per_second)
    if room_bytes is not None and _will_stretch_fill(stretch, track, room_bytes):
        pace = stretch.bytes_per_second
    # The rate of the growth as a whole is the most precise. The rate as a whole is therefore
    # replaced only if the stretch is clearly faster.
    if pace < DILUTED_RATIO * max(estimate.bytes_per_second, estimate.pace or 0.0):
        return estimate
    bytes_per_request = estimate.bytes_per_request
    if bytes_per_request is not None and track.work.requests_per_second > 0:
        # The rates per second and per request measure the same growth. If the rate per second was
        # too low, so was the rate per request.
        bytes_per_request = max(bytes_per_request, pace / track.work.requests_per_second)
    return replace(
        estimate,
        bytes_per_second=max(pace, estimate.bytes_per_second),
        bytes_per_request=bytes_per_request,
        upper=max(pace, estimate.upper),
        pace=pace,
        fastest=max(pace, fastest),
    )


def _will_stretch_fill(stretch: Stretch, track: Track, room_bytes: float) -> bool:
    """Return whether the stretch is still growing and is expected to fill the room.

    The stretch is expected to last as long again as the longest stretch so far.
    """
    if track.clock.now_seconds - stretch.ended_seconds > QUIET_SECONDS:
        return False
    left_seconds = (room_bytes - OUT_OF_MEMORY_BYTES) / stretch.bytes_per_second
    return left_seconds <= stretch.longest_seconds


def _limit_half_width(slope: Slope, growth: Growth) -> Slope:
    """Return the slope with its half width limited by Poisson's law.

    The growth must have no pauses. The law is applied to steps of the growth's typical size, as in
    `weigh_pace`. The five batches may have only two or three blocks each. So few blocks may differ
    so much by chance that the confidence interval is meaningless.
    """
    step_count = growth.grown_bytes / growth.typical_step_bytes
    limit = slope.rate * STANDARD_ERRORS_95 / sqrt(step_count)
    return slope._replace(half_width=min(slope.half_width, max(0.0, limit)))


def _is_load_known(track: Track, *, by_requests: bool) -> bool:
    """Return whether load will stay below its observed peak, or does not matter.

    Load is expected to stay below its peak once a day has been observed. Load does not matter for a
    leak that grows with time. Whether a leak grows with time is known only if requests are counted.
    """
    if track.clock.now_seconds >= DAY_SECONDS:
        return True
    return not by_requests and track.work.counter_total is not None


def set_time_left(estimate: Estimate, track: Track, room_bytes: float) -> Estimate:
    """Return the estimate with the time until `room_bytes` is full and its lower bound.

    Memory runs out at a peak rather than in the current valley. The lower bound is therefore the
    time until the next peak fills the room. At that peak, memory that follows load or is rarely
    collected returns to its old height. Memory that has leaked since the last peak is added to this
    height. In addition, there may be a demand as large as the largest recent one. The expected time
    and its lower bound are None if the estimate has no pace.
    """
    floors_bytes = [block.floor_bytes for block in track.history.rings[0].blocks]
    swing_bytes = 0.0
    for block, fall_bytes in list_falls(track.history.rings):
        old_height_bytes = block.floor_bytes - floors_bytes[-1]
        since_seconds = track.clock.now_seconds - block.seconds
        return_bytes = old_height_bytes + estimate.bytes_per_second * since_seconds
        swing_bytes = max(swing_bytes, min(fall_bytes, return_bytes))
    rises_bytes = (later - earlier for earlier, later in pairwise(floors_bytes))
    largest_rise_bytes = max(rises_bytes, default=0.0)
    demand_bytes = max(swing_bytes + largest_rise_bytes, OUT_OF_MEMORY_BYTES)

    pace = estimate.pace or 0.0
    fastest = estimate.fastest or 0.0
    stretch = None if track.alarm is None else track.alarm.stretch
    if stretch is not None and _will_stretch_fill(stretch, track, room_bytes):
        fastest = max(fastest, stretch.bytes_per_second)
        # During a long alarm, an estimate is made only every 16 minutes. The current estimate may
        # therefore be older than this stretch.
        if stretch.bytes_per_second >= DILUTED_RATIO * pace:
            pace = stretch.bytes_per_second
    oom_seconds = None
    if pace:
        oom_seconds = max(0.0, room_bytes - OUT_OF_MEMORY_BYTES) / pace
    oom_seconds_lower = None
    if fastest:
        seconds_until_peak = max(0.0, room_bytes - demand_bytes) / fastest
        margin_seconds = min(MARGIN_SECONDS, MOST_MARGIN_SHARE * seconds_until_peak)
        oom_seconds_lower = max(0.0, seconds_until_peak - margin_seconds)

    next_step = find_next_step(track.history.steps)
    if next_step is not None and next_step.size_bytes > room_bytes - OUT_OF_MEMORY_BYTES:
        # The next large step does not fit. Memory will be full at that step at the latest.
        now_seconds = track.clock.now_seconds
        earliest_seconds = max(0.0, next_step.earliest_seconds - now_seconds)
        likely_seconds = max(0.0, next_step.likely_seconds - now_seconds)
        times_seconds = (earliest_seconds, oom_seconds, oom_seconds_lower)
        oom_seconds_lower = min([seconds for seconds in times_seconds if seconds is not None])
        oom_seconds = likely_seconds if oom_seconds is None else min(likely_seconds, oom_seconds)
    return replace(estimate, oom_seconds=oom_seconds, oom_seconds_lower=oom_seconds_lower)


def measure_slope(axis: list[float], values: tuple[float, ...], step_bytes: float) -> Slope:
    """Return the slope of retained memory along an axis of seconds or requests.

    The slope is the Theil-Sen estimator over the later half: the median of the slopes between all
    pairs of blocks. Single benign steps hardly affect this median. If the median is zero, memory
    grew in a few large steps. In that case, the slope is taken between the first and the last
    block. The confidence interval of the slope is computed from batch means over the last three
    quarters of the curve. Single rises would not be independent. One allocator step is added to the
    confidence interval, because memory is not known more precisely. If the axis has no length, the
    rate is 0 and the spread is infinite.
    """
    length = axis[-1] - axis[0]
    if length <= 0:
        return Slope(0.0, 0.0, inf)
    middle = len(axis) // 2
    stride = -(-(len(axis) - middle) // SLOPE_POINTS)  # rounded up
    later_half = zip(axis[middle::stride], values[middle::stride], strict=True)
    slopes = [
        (later_value - value) / (later - at)
        for (at, value), (later, later_value) in combinations(later_half, 2)
        if later > at
    ]
    rate = median(slopes) if slopes else 0.0
    if rate == 0.0:  # Most pairs of blocks lie between the same two steps, with a slope of 0.
        rate = (values[-1] - values[0]) / length

    batch_rates = _measure_batches(axis, values)
    if len(batch_rates) < BATCHES:  # The growth is too short, or no request finished in a batch.
        return Slope(rate, abs(rate), inf)
    deviation = stdev(batch_rates)
    step_rate = step_bytes / (axis[-1] - axis[middle])
    half_width = T_95 * deviation / sqrt(BATCHES) + step_rate
    # The mean is 0 if the rates of the batches cancel each other out. The lower limit of the
    # divisor makes the spread huge and avoids a division by zero.
    return Slope(rate, half_width, deviation / max(abs(fmean(batch_rates)), 1e-9))


def _measure_batches(axis: list[float], values: tuple[float, ...]) -> list[float]:
    """Return each batch's slope.

    The batches divide the last three quarters. A batch is omitted if it spans no time or no
    requests.
    """
    # The batches are cut backwards from the newest block. If the blocks do not divide evenly, the
    # oldest ones are omitted.
    batch_size = (len(axis) - 1 - len(axis) // 4) // BATCHES
    cuts = [len(axis) - 1 - batch_size * number for number in range(BATCHES, -1, -1)]
    return [
        (values[end] - values[begin]) / (axis[end] - axis[begin])
        for begin, end in pairwise(cuts)
        if axis[end] > axis[begin]
    ]


def forecast_rate(track: Track, horizon_seconds: float) -> float:
    """Return the expected requests per second over a horizon.

    The rate is the mean over the last `horizon_seconds`, or over a shorter known past. If this
    period is shorter than SHORTEST_MEAN_SECONDS, the recent rate is used. The recent rate is the
    average of the last few minutes.
    """
    recent_rate = track.work.requests_per_second
    longest_blocks = track.history.rings[-1].blocks
    if not longest_blocks or horizon_seconds < SHORTEST_MEAN_SECONDS:
        return recent_rate
    now_seconds = track.clock.now_seconds
    begin_seconds = now_seconds - horizon_seconds
    # `begin` is the position of the latest block that is at least a whole horizon old.
    begin = bisect_right(longest_blocks, begin_seconds, key=lambda block: block.seconds) - 1
    oldest = longest_blocks[max(0, begin)]
    past_seconds = now_seconds - oldest.seconds
    if past_seconds < SHORTEST_MEAN_SECONDS:
        return recent_rate
    return (track.work.requests - oldest.requests) / past_seconds
