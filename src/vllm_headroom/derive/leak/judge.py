"""Judge one series: reach a verdict from its evidence, and raise or end its alarm."""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise
from math import inf
from statistics import median
from typing import Final, NamedTuple

from msgspec.structs import replace

from vllm_headroom.derive.leak.estimate import (
    apply_stretch,
    clip_largest_rise,
    estimate_growth,
    set_time_left,
)
from vllm_headroom.derive.leak.facts import (
    LARGE_BYTES,
    OUT_OF_MEMORY_BYTES,
    RISE_BYTES,
    Block,
    Certainty,
    Growth,
    LeakAlarm,
    Ring,
    Stretch,
    Track,
    find_retained,
    list_falls,
)
from vllm_headroom.derive.leak.growth_evidence import (
    ASSUMED_ROOM_BYTES,
    CLIP_MEDIANS,
    GROWING_SECONDS,
    LATE_SHARE,
    LEAKING_SECONDS,
    LEAST_GROWTH_BYTES,
    QUIET_SECONDS,
    STEADY_BLOCKS,
    STRAIGHT_BYTES,
    WINDOW_BLOCKS,
    RingSurvey,
    clip_rises,
    cut_window,
    find_next_step,
    find_step_windows,
    has_ended,
    has_lasted,
    is_even,
    is_over,
    is_steady,
    is_straight,
    judge_steps,
    survey_ring,
    weigh_pace,
)
from vllm_headroom.derive.leak.precedent import LOWER_LOAD, find_excused_bytes, note_reached
from vllm_headroom.units import DAY_SECONDS, GIB

LEAST_RISES: Final = 6
"""The minimum number of rises for a verdict. Fewer rises look like the first uses of kernels."""

LEAST_RISE_ODDS: Final = 10.0
"""The minimum log odds from the number of blocks in which memory rose."""

WITNESS_ODDS_LIMIT: Final = 12.0
"""The log odds from rises and from pace are each limited to this. With this limit, neither is
sufficient alone.
"""

GROWING_ODDS_SUM: Final = 12.0
"""A warning requires at least this sum of log odds from rises and pace."""

LEAKING_ODDS_SUM: Final = 14.0
"""An alarm requires at least this sum of log odds from rises and pace."""

LEAKING_ODDS_SUM_IF_FAR: Final = 18.0
"""An alarm requires at least this sum if memory lasts longer than `FAR_SECONDS`."""

FAR_SECONDS: Final = 30 * DAY_SECONDS
"""Out-of-memory is far away if it is expected in more than this time."""

SOON_SHARE: Final = 0.75
"""Steady growth under an hour needs no odds once it has lasted for this share of the time until
memory is full. After an hour, `LATE_SHARE` is used instead.
"""

GONE_RATIO: Final = 6.0
"""Our choice: most room is gone if growth took this many times the remaining room."""

CLIPPED_GONE_RATIO: Final = 4.0
"""Our choice: this is GONE_RATIO for growth with its largest rise clipped. The clipped part counts
as free room.
"""

STRAIGHT_LEFT_SECONDS: Final = 600.0
"""A straight line of six blocks raises an alarm if memory will be full in less time than this.
Within minutes of a full card, there is no time for eleven blocks.
"""

STARTUP_SHARE: Final = 0.25
"""Our choice: if memory grows by more than this share of the memory that was held initially, within
minutes, a process is starting or waking up.
"""

POOL_OVERHEAD: Final = 1.15
"""A pool may take this many times its configured size."""

KEPT_PACE: Final = 1.5
"""Our choice: the time since the first quarter of the run is divided into thirds. Growth keeps its
pace if it is large enough in the last two thirds. The growth in the last two thirds must be at
least this many times the growth in the first third. On a straight line, growth is twice as large in
the last two thirds. On a logarithmic curve, both parts grow equally.
"""

BUSIEST_RATIO: Final = 1.25
"""Our choice: load is a new maximum from this many times the earlier maximum. The earlier maximum
is the busiest earlier quarter of an hour.
"""

MISSED_SECONDS: Final = 960.0
"""Large steps are judged in a single ring. Of the rings that reach back to the origin, the one with
the shortest blocks of at least two minutes is chosen. Up to this much time after the origin may be
missing from that ring. The time is the length of one of the longest blocks.
"""


def judge_track(track: Track, room_bytes: int | None) -> Track:
    """Return the track with its verdict, alarm and estimate.

    Call this whenever a block of the shortest length ends. Computing the verdict is expensive. The
    verdict is therefore computed only every two minutes, when a block of the second ring ends. At
    other times, only the time until memory is full is updated. The verdict uses the room that was
    available when other processes held the least memory. The time until memory is full uses the
    current room. If `room_bytes` is None, the room is unknown.
    """
    origin = track.history.origin
    newest = track.history.rings[0].blocks[-1] if track.history.rings[0].blocks else None
    if origin is None or newest is None or newest.seconds != track.clock.now_seconds:
        return track  # The block that ended was idle, so it is not in the ring.
    own_room_bytes = None
    if room_bytes is not None:
        # The highest capacity so far is used. If the current capacity were used, a neighbour that
        # takes room could make a little growth a leak.
        capacity_bytes = (track.history.held_bytes or 0.0) + room_bytes
        capacity_bytes = max(track.history.capacity_bytes, capacity_bytes)
        track = replace(track, history=replace(track.history, capacity_bytes=capacity_bytes))
        own_room_bytes = capacity_bytes - newest.floor_bytes
    track = note_reached(track, newest)
    if track.alarm is not None:
        track = update_alarm(track, track.alarm, newest)

    shortest_ring, second_ring, *_ = track.history.rings
    recent_bytes = newest.floor_bytes - shortest_ring.blocks[0].floor_bytes
    # Growth that fills three quarters of the room within half an hour is fast. Fast growth is
    # judged every 30 s.
    is_slow = own_room_bytes is None or recent_bytes < SOON_SHARE * own_room_bytes
    is_between = second_ring.parts > 0
    if is_between and is_slow:
        return _update_estimate(track, None, room_bytes)
    # During an alarm, no verdict is reached. The alarm continues until its growth has ended.
    if track.alarm is not None:
        alarm = _measure_stretch(track, track.alarm)
        track = replace(track, alarm=alarm)
        growth = _measure_alarm(track, alarm)
    else:
        track, growth = _judge_rings(track, origin, own_room_bytes)
    return _update_estimate(track, growth, room_bytes)


HOLD_SECONDS: Final = 2700.0
"""Our choice: an alarm ends only after this time without a rise."""

HOLD_GAPS: Final = 3.0
"""An alarm ends only after this many usual gaps without a rise."""

PAUSE_FACTOR: Final = 1.5
"""A leak has pauses if an alarm began soon after the previous alarm. The alarm must start within a
day of the previous alarm's last rise. The pause is the time between that rise and the start of the
alarm. In a leak with pauses, an alarm without a rise continues for this many times the pause.
"""

NEARLY_FULL_BYTES: Final = GIB
"""If less room than this remains, torch's cache hides growth. The less room there is, the longer an
alarm continues. The alarm does not end even if all of its growth is released.
"""

RETAINED_SHARE: Final = 0.5
"""An alarm ends when less than this share of its growth is still held."""

LOW_SHARE: Final = 0.05
"""Our choice: low points have risen if this share of the growth is still held. This is measured
after a release. Memory that rises and falls without a leak returns to its starting point. A leak of
57 kB/s under torch's garbage_collection_threshold kept a tenth of its growth.
"""

FADED_SECONDS: Final = DAY_SECONDS / 2
"""Growth over this period is compared with the time until memory is full. The period is longer than
a pause at night.
"""

LEAST_OLDER_BLOCKS: Final = 4
"""Our choice: the load before FADED_SECONDS is measured over at least this many blocks. Together,
they last an hour.
"""

NO_CONCERN_SECONDS: Final = 365 * DAY_SECONDS
"""Growth that takes a year to fill the memory raises no alarm. Engines are restarted more often."""

RETAINED_BLOCKS: Final = 10
"""The memory that is still held is the highest floor of the newest blocks. This many of the
shortest blocks are used, which together last five minutes. A single low block proves nothing,
because a cache is filled again after a sleep.
"""


SLOWED_SHARE: Final = 0.25
"""Our choice: growth is compared with the pace of the alarm's growth until its peak. Growth at less
than this share of that pace is not attributed to the leak.
"""

LEAST_BREATH_BLOCKS: Final = 6
"""Our choice: low points are compared only with at least this many blocks in between."""


def update_alarm(track: Track, alarm: LeakAlarm, newest: Block) -> Track:
    """Return the track with its alarm updated by the newest block.

    An alarm that has ended is removed. The alarm ends if:

    - memory has not risen for a long time
    - most of its growth was released
    - a full cache is merely released and refilled

    When the alarm ends, the evidence starts over too.
    """
    alarm = _update_peak(alarm, newest)
    track = replace(track, alarm=alarm)
    if is_breathing(track, alarm, newest):
        return _end_alarm(track, alarm.peak)
    # On a nearly full card, torch may have released its cache although the leak continued.
    was_nearly_full = _compute_hold_factor(track, alarm.peak) > 1.0
    if not was_nearly_full and _has_faded(track):
        return _end_alarm(track, alarm.newest_rise)
    # Growth is continuing, so the time without a rise starts over.
    if newest.floor_bytes >= alarm.newest_rise.floor_bytes + RISE_BYTES:
        return replace(track, alarm=_add_rise(alarm, newest))

    # After a release, growth is measured from the low point that followed it.
    began = alarm.low or alarm.began
    newest_rise = alarm.newest_rise
    hold_factor = _compute_hold_factor(track, newest_rise)
    fall_bytes = newest_rise.floor_bytes - newest.floor_bytes
    retained_share = RETAINED_SHARE
    if hold_factor > 1.0:
        # The card was nearly full, so torch's allocator released its cache. The growth itself was
        # therefore not released.
        began = replace(began, floor_bytes=began.floor_bytes - max(0.0, fall_bytes))
        retained_share = 0.0
    grown_bytes = newest_rise.floor_bytes - began.floor_bytes
    retained_bytes = began.floor_bytes + retained_share * grown_bytes
    if fall_bytes > LARGE_BYTES and newest.floor_bytes >= retained_bytes:
        # More than usual was released, but the leak may continue. The next rise is measured from
        # here.
        if alarm.low is None:
            return replace(track, alarm=replace(alarm, began=began, newest_rise=newest))
        return replace(track, alarm=replace(alarm, low=began, newest_rise=newest))

    # The highest value in five minutes is used. After a sleep, the engine takes its memory again
    # within minutes.
    recent_blocks = track.history.rings[0].blocks[-RETAINED_BLOCKS:]
    is_retained = max(block.floor_bytes for block in recent_blocks) >= retained_bytes
    has_stopped = is_over(
        began,
        newest_rise,
        newest,
        # The count is the number of steps there would be if all steps were equal.
        step_count=grown_bytes**2 / alarm.sum_of_squares,
        quiet_seconds=_compute_quiet_seconds(track, began, hold_factor),
        quiet_gaps=hold_factor * HOLD_GAPS,
    )
    if has_stopped:
        return _end_alarm(track, newest_rise)
    if is_retained:
        return track
    # Most of the growth was released. If some of the growth is still held, the low points are
    # rising. In that case, the alarm ends only if memory stops rising from here.
    base = alarm.low or track.history.anchor or began
    least_bytes = base.floor_bytes + LOW_SHARE * (newest_rise.floor_bytes - base.floor_bytes)
    if newest.floor_bytes >= least_bytes:
        return replace(track, alarm=replace(alarm, low=alarm.low or newest, newest_rise=newest))
    return _end_alarm(track, newest_rise)


def _has_faded(track: Track) -> bool:
    """Return whether growth no longer justifies an alarm.

    Memory must have been lower for half a day, or need a year to fill. Returns False until the
    series has been observed for half a day. If load was lower too, lower memory proves nothing,
    because memory may follow load.
    """
    longest_ring = track.history.rings[-1]
    if not _has_just_ended(longest_ring, track):
        return False  # Nothing has changed since the ring's newest block.
    now_seconds = track.clock.now_seconds
    begin_seconds = now_seconds - FADED_SECONDS
    begin = bisect_left(longest_ring.blocks, begin_seconds, key=lambda block: block.seconds)
    older, recent = longest_ring.blocks[:begin], longest_ring.blocks[begin:]
    if len(older) < LEAST_OLDER_BLOCKS or not recent:
        return False
    older_bytes = max(longest_ring.highest_bytes, *(block.floor_bytes for block in older))
    is_lower = max(block.floor_bytes for block in recent) < older_bytes - LARGE_BYTES
    if is_lower and _measure_load(recent) >= LOWER_LOAD * _measure_load(older):
        return True
    # If the room is unknown, the time until it is full is unknown too.
    if not track.history.capacity_bytes:
        return False
    room_bytes = track.history.capacity_bytes - recent[-1].floor_bytes
    retained_bytes = find_retained(recent)
    middle_bytes = retained_bytes[len(retained_bytes) // 2]
    # If growth has paused, the time without a rise decides whether the alarm ends.
    goes_on = retained_bytes[0] < middle_bytes < retained_bytes[-1]
    grown_bytes = retained_bytes[-1] - retained_bytes[0]
    return goes_on and grown_bytes < room_bytes * FADED_SECONDS / NO_CONCERN_SECONDS


def _measure_load(blocks: tuple[Block, ...]) -> float:
    """Return the requests per second between these blocks, or 0 if no time passed."""
    seconds = blocks[-1].seconds - blocks[0].seconds
    return (blocks[-1].requests - blocks[0].requests) / max(1.0, seconds)


def _update_peak(alarm: LeakAlarm, newest: Block) -> LeakAlarm:
    """Return the alarm with the newest block as its peak if it is sufficiently higher."""
    least_rise_bytes = max(RISE_BYTES, SLOWED_SHARE * _expect_rise(alarm, alarm.peak, newest))
    if newest.floor_bytes < alarm.peak.floor_bytes + least_rise_bytes:
        return alarm
    return replace(alarm, peak=newest)


def _expect_rise(alarm: LeakAlarm, begin: Block, end: Block) -> float:
    """Return the growth expected between two blocks at the alarm's pace.

    The pace is that of the growth until the alarm's peak. The lower of the paces by time and by
    requests is used. A leak may follow either.
    """
    grown_bytes = alarm.peak.floor_bytes - alarm.began.floor_bytes
    share = (end.seconds - begin.seconds) / max(1.0, alarm.peak.seconds - alarm.began.seconds)
    requests = alarm.peak.requests - alarm.began.requests
    if requests > 0:
        share = min(share, (end.requests - begin.requests) / requests)
    return share * grown_bytes


def is_breathing(track: Track, alarm: LeakAlarm, newest: Block) -> bool:
    """Return whether a full cache is merely being released in part and filled again.

    In a leak, memory would have returned to its peak by now. The low points of a leak would also be
    rising. A release of torch's cache does not end a leak.
    """
    peak = alarm.peak
    grown_bytes = peak.floor_bytes - alarm.began.floor_bytes
    hold_factor = _compute_hold_factor(track, peak)
    # On a nearly full card, torch's cache hides growth. The cache is released even though the leak
    # continues.
    if hold_factor > 1.0 or newest.floor_bytes > peak.floor_bytes:
        return False
    is_quiet = is_over(
        alarm.began,
        peak,
        newest,
        step_count=grown_bytes**2 / alarm.sum_of_squares,
        quiet_seconds=_compute_quiet_seconds(track, alarm.began, hold_factor),
        quiet_gaps=HOLD_GAPS,
    )
    if not is_quiet:
        return False
    # Of the rings that reach back to the peak, this one has the shortest blocks.
    ring = _find_reaching_ring(track.history.rings, peak.seconds)
    blocks = [block for block in ring.blocks if block.seconds > peak.seconds]
    if len(blocks) < LEAST_BREATH_BLOCKS:
        return False
    middle = len(blocks) // 2
    earlier_low_bytes = min(block.floor_bytes for block in blocks[:middle])
    later_low_bytes = min(block.floor_bytes for block in blocks[middle:])
    released_bytes = peak.floor_bytes - min(earlier_low_bytes, later_low_bytes)
    if not LARGE_BYTES < released_bytes < _expect_rise(alarm, peak, newest):
        return False
    # The two low points are separated by half the time since the peak.
    rise_bytes = SLOWED_SHARE * _expect_rise(alarm, peak, newest) / 2
    return later_low_bytes < earlier_low_bytes + rise_bytes


def _add_rise(alarm: LeakAlarm, newest: Block) -> LeakAlarm:
    rise_bytes = newest.floor_bytes - alarm.newest_rise.floor_bytes
    sum_of_squares = alarm.sum_of_squares + rise_bytes**2
    return replace(alarm, newest_rise=newest, sum_of_squares=sum_of_squares)


def _compute_hold_factor(track: Track, newest_rise: Block) -> float:
    """Return how many times longer than usual an alarm lasts.

    The result is 1 if memory is not nearly full.
    """
    if not track.history.capacity_bytes:
        return 1.0
    room_bytes = track.history.capacity_bytes - newest_rise.floor_bytes
    return max(1.0, NEARLY_FULL_BYTES / max(1.0, room_bytes))


def _compute_quiet_seconds(track: Track, began: Block, hold_factor: float) -> float:
    """Return how many seconds must pass without a rise before the alarm ends."""
    pause_seconds = inf
    if track.previous_alarm_seconds is not None:
        pause_seconds = began.seconds - track.previous_alarm_seconds
    quiet_seconds = hold_factor * HOLD_SECONDS
    if pause_seconds < DAY_SECONDS:
        quiet_seconds = max(quiet_seconds, PAUSE_FACTOR * pause_seconds)
    return quiet_seconds


def _end_alarm(track: Track, newest_rise: Block) -> Track:
    """Return the track without its alarm.

    The evidence restarts at the newest block of each ring.
    """
    rings = [
        # From now on, only growth above the height that this alarm reached is evidence.
        Ring(blocks=ring.blocks[-1:], highest_bytes=newest_rise.floor_bytes)
        for ring in track.history.rings
    ]
    return replace(
        track,
        history=replace(track.history, rings=tuple(rings)),
        alarm=None,
        verdict=Certainty.NONE,
        is_excused=False,
        # The time of the alarm's last rise is kept, not the current time. The length of the pause
        # shows whether a leak has pauses.
        previous_alarm_seconds=newest_rise.seconds,
    )


def _find_reaching_ring(rings: tuple[Ring, ...], seconds: float) -> Ring:
    """Return the ring with the shortest blocks that reaches back to this time.

    If no ring reaches back so far, the last ring is returned.
    """
    for ring in rings:
        if ring.blocks and ring.blocks[0].seconds <= seconds:
            return ring
    return rings[-1]


def _has_just_ended(ring: Ring, track: Track) -> bool:
    """Return whether this reading has ended a block of the ring."""
    return bool(ring.blocks) and ring.blocks[-1].seconds == track.clock.now_seconds


def _measure_alarm(track: Track, alarm: LeakAlarm) -> Growth | None:
    """Return the growth since the alarm's growth began.

    Returns None if that growth is too small. Also returns None unless a block of the ring used has
    just ended. The ring used reaches back to the start of the growth.
    """
    ring = _find_reaching_ring(track.history.rings, alarm.began.seconds)
    if not _has_just_ended(ring, track):
        return None
    survey = survey_ring(ring, alarm.began)
    return None if survey is None else cut_window(survey, 0)


LEAST_STRETCH_SECONDS: Final = 600.0
"""Our choice: no rate is computed for a shorter stretch."""

LEAST_STRETCH_SHARE: Final = 0.05
"""Our choice: a stretch with a smaller share of the alarm's growth is a pause."""

REFILL_FACTOR: Final = 1.5
"""Our choice, as for DILUTED_RATIO: below the alarm's peak, a stretch's rate is limited. The limit
is this many times the rate of the growth up to the peak.
"""

LEAST_RISE_SHARE: Final = 0.1
"""Our choice: rises below this share of the mean rise over two hours are ignored. Host memory
fluctuates by a few MiB during a pause.
"""


def _measure_stretch(track: Track, alarm: LeakAlarm) -> LeakAlarm:
    """Return the alarm with its newest stretch of growth.

    A stretch has no pause and no large release. The previous stretch is kept if the newest blocks
    have fewer than LEAST_RISES rises.
    """
    blocks = track.history.rings[1].blocks
    begin = len(blocks) - 1
    floors_bytes = [block.floor_bytes for block in blocks]
    all_rises_bytes = sum([max(0.0, later - earlier) for earlier, later in pairwise(floors_bytes)])
    least_rise_bytes = max(RISE_BYTES, LEAST_RISE_SHARE * all_rises_bytes / len(blocks))
    newest_rise = blocks[-1]
    rises_bytes: list[float] = []
    # The loop runs backwards from the newest block. The loop ends at a large release or a long
    # pause.
    for number in range(len(blocks) - 1, 0, -1):
        rise_bytes = blocks[number].floor_bytes - blocks[number - 1].floor_bytes
        # The loop stops before the alarm's growth. A warm-up before that growth is faster.
        if rise_bytes < -LARGE_BYTES or blocks[number - 1].seconds < alarm.began.seconds:
            break
        if rise_bytes >= least_rise_bytes:
            if not rises_bytes:
                newest_rise = blocks[number]
            rises_bytes.append(rise_bytes)
            begin = number - 1
        elif blocks[begin].seconds - blocks[number - 1].seconds > QUIET_SECONDS:
            break
    began_seconds = blocks[begin].seconds
    measured_seconds = newest_rise.seconds - began_seconds
    grown_bytes = newest_rise.floor_bytes - blocks[begin].floor_bytes
    alarm_bytes = alarm.newest_rise.floor_bytes - alarm.began.floor_bytes
    is_small = grown_bytes < max(LEAST_GROWTH_BYTES, LEAST_STRETCH_SHARE * alarm_bytes)
    if len(rises_bytes) < LEAST_RISES or measured_seconds < LEAST_STRETCH_SECONDS or is_small:
        return alarm
    longest_seconds = 0.0
    if alarm.stretch is not None:
        longest_seconds = alarm.stretch.longest_seconds
        # The same stretch continues, and began before the oldest block in the ring.
        if began_seconds <= alarm.stretch.ended_seconds:
            began_seconds = min(began_seconds, alarm.stretch.began_seconds)
    # A single large demand does not indicate a pace, so the rises are clipped.
    limit_bytes = max(LARGE_BYTES, CLIP_MEDIANS * median(rises_bytes))
    excess_bytes = sum([max(0.0, rise_bytes - limit_bytes) for rise_bytes in rises_bytes])
    bytes_per_second = (grown_bytes - excess_bytes) / measured_seconds
    if newest_rise.floor_bytes < alarm.peak.floor_bytes - LARGE_BYTES:
        # Memory that was released is taken again faster than a leak grows.
        peak_seconds = max(1.0, alarm.peak.seconds - alarm.began.seconds)
        peak_rate = (alarm.peak.floor_bytes - alarm.began.floor_bytes) / peak_seconds
        bytes_per_second = min(bytes_per_second, REFILL_FACTOR * peak_rate)
    stretch = Stretch(
        bytes_per_second=bytes_per_second,
        began_seconds=began_seconds,
        ended_seconds=newest_rise.seconds,
        longest_seconds=max(longest_seconds, newest_rise.seconds - began_seconds),
    )
    return replace(alarm, stretch=stretch)


def _update_estimate(track: Track, growth: Growth | None, room_bytes: int | None) -> Track:
    """Return the track with a new estimate of this growth and the time until memory is full.

    The old estimate is kept if `growth` is None. The old estimate is also kept if the new one shows
    no growth, as in a valley between two peaks. If there is no verdict, the track has no estimate.
    """
    if not track.verdict:
        return replace(track, estimate=None)
    estimate = track.estimate
    if growth is not None:
        began_bytes = growth.retained_bytes[0]
        # The alarm's growth may have begun before the measured window.
        if track.alarm is not None:
            began_bytes = track.alarm.began.floor_bytes
        new_estimate = estimate_growth(
            growth, began_bytes=began_bytes, track=track, room_bytes=room_bytes
        )
        new_estimate = apply_stretch(new_estimate, track, room_bytes)
        if estimate is None or new_estimate.pace is not None:
            estimate = new_estimate
    # The time until memory is full is updated at every block, because the room changes between two
    # verdicts.
    if estimate is not None and room_bytes is not None:
        estimate = set_time_left(estimate, track, room_bytes)
    return replace(track, estimate=estimate)


class WindowJudgement(NamedTuple):
    """The verdict on a window, its evidence as log odds, and its growth."""

    verdict: Certainty
    odds: float
    growth: Growth


def _judge_rings(
    track: Track, origin: Block, room_bytes: float | None
) -> tuple[Track, Growth | None]:
    """Judge the rings in which a block has just ended.

    Returns the track and the growth with the most certain verdict. The track's verdict is the
    highest verdict of all rings. A verdict of LEAKING raises an alarm. The returned growth is from
    the window whose verdict is now the most certain. The growth is None if no window has a verdict.
    The growth is also None if another ring has an older, more certain verdict. The growth for this
    older verdict has already been estimated.
    """
    ring_of_steps = _find_reaching_ring(track.history.rings[1:], origin.seconds + MISSED_SECONDS)
    excused_bytes = find_excused_bytes(track)
    rings: list[Ring] = []
    surest: WindowJudgement | None = None
    for ring in track.history.rings:
        if not _has_just_ended(ring, track):
            rings.append(ring)  # The ring keeps the verdict that it reached at its newest block.
            continue
        judgement = None
        survey = survey_ring(ring, origin)
        if survey is not None:
            has_steps = ring is ring_of_steps
            judgements = _judge_windows(survey, track, origin, room_bytes, has_steps=has_steps)
            judgement = max(judgements, key=_rank_judgement, default=None)
        is_sure = judgement is not None and judgement.verdict is Certainty.LEAKING
        if ring is track.history.rings[0] and not is_sure:
            judgement = _judge_straight_line(ring, track, room_bytes) or judgement
        verdict = Certainty.NONE if judgement is None else judgement.verdict
        rings.append(replace(ring, verdict=verdict))
        if judgement is None or verdict is Certainty.NONE:
            continue
        # If verdicts are equally certain, the one from the longest blocks is used.
        if surest is None or verdict >= surest.verdict:
            surest = judgement

    verdict = max(ring.verdict for ring in rings)
    if is_room_gone(room_bytes):
        verdict = min(verdict, Certainty.GROWING)
    # Memory has reached this height before without a leak. Growth up to this height causes at most
    # a warning.
    is_excused = verdict > Certainty.NONE and rings[0].blocks[-1].floor_bytes < excused_bytes
    if is_excused:
        verdict = Certainty.GROWING
    history = replace(track.history, rings=tuple(rings))
    track = replace(track, history=history, verdict=verdict, is_excused=is_excused)
    urgent_growth = None
    # Two other conditions also raise an alarm, regardless of the windows. Another step of a
    # repeating size would not fit, or most room is gone.
    if verdict is not Certainty.LEAKING and room_bytes is not None:
        urgent_growth = _find_growth_without_next_step(track, room_bytes)
        if urgent_growth is None and not is_excused:
            urgent_growth = find_growth_without_room(track, room_bytes)
    if urgent_growth is not None:
        track = replace(
            track,
            verdict=Certainty.LEAKING,
            alarm=_raise_alarm(urgent_growth),
            is_excused=False,
        )
        return track, urgent_growth
    if surest is None:
        return track, None
    if verdict is Certainty.LEAKING:
        track = replace(track, alarm=_raise_alarm(surest.growth))
    # An older verdict is more certain, so the estimate of its growth is kept.
    is_of_now = surest.verdict >= verdict
    return track, surest.growth if is_of_now or track.estimate is None else None


def is_room_gone(room_bytes: float | None) -> bool:
    """Return whether so little room is left that a new alarm would come too late.

    An engine that keeps serving without any room left needs no more memory.
    """
    return room_bytes is not None and room_bytes <= OUT_OF_MEMORY_BYTES


def _find_growth_without_next_step(track: Track, room_bytes: float) -> Growth | None:
    """Return the growth since the first of several large steps.

    The next step must not fit into the room. Returns None if the next step fits, or if memory did
    not grow.
    """
    next_step = find_next_step(track.history.steps)
    if next_step is None or next_step.size_bytes <= room_bytes - OUT_OF_MEMORY_BYTES:
        return None
    ring = _find_reaching_ring(track.history.rings, next_step.first_seconds)
    begin = bisect_left(ring.blocks, next_step.first_seconds, key=lambda block: block.seconds) - 1
    survey = survey_ring(ring, ring.blocks[max(0, begin)])
    return None if survey is None else cut_window(survey, 0)


def find_growth_without_room(track: Track, room_bytes: float) -> Growth | None:
    """Return the run's growth if it took most of the room and continues.

    The growth must not have slowed down. Bounded growth slows down before it takes most of the
    room. Returns None in the first hour, because memory grows fast during startup.
    """
    anchor = track.history.anchor
    assert anchor is not None  # noqa: S101 - it is set before the first block
    newest = track.history.rings[0].blocks[-1]
    grown_bytes = newest.floor_bytes - anchor.floor_bytes
    usable_bytes = room_bytes - OUT_OF_MEMORY_BYTES
    if usable_bytes <= 0 or grown_bytes < GONE_RATIO * usable_bytes:
        return None
    is_young = newest.seconds - anchor.seconds < LEAKING_SECONDS
    if is_young or newest.floor_bytes < _find_full_pools(track):
        return None
    survey = survey_ring(_find_reaching_ring(track.history.rings, anchor.seconds), anchor)
    # No odds are used here. The check for fading excludes a cache that grows at each new maximum.
    # The growth of such a cache slows down over time.
    if survey is None or is_fading(track, by_either=True):
        return None
    growth = cut_window(survey, 0)
    if growth.rise_count < LEAST_RISES or has_ended(growth):
        return None
    # Memory that is not rising now gives no reason to raise an alarm now.
    newest_rise = growth.blocks[bisect_left(growth.retained_bytes, growth.retained_bytes[-1])]
    if growth.blocks[-1].seconds - newest_rise.seconds > QUIET_SECONDS:
        return None
    # A single large demand may take most of the room of a healthy engine.
    median_rise_bytes = median(rise for rise in growth.rises_bytes if rise > 0)
    clipped_bytes = clip_largest_rise(growth, median_rise_bytes)
    excess_bytes = growth.retained_bytes[-1] - clipped_bytes[-1]
    if grown_bytes - excess_bytes < CLIPPED_GONE_RATIO * (usable_bytes + excess_bytes):
        return None
    return growth


def _judge_straight_line(
    ring: Ring, track: Track, room_bytes: float | None
) -> WindowJudgement | None:
    """Return an alarm if straight growth fills the room within minutes, otherwise None.

    Growth is measured from the start of the stretch. A burst of requests may double the load in
    each block.
    """
    blocks = ring.blocks[-WINDOW_BLOCKS[0] - 1 :]
    anchor = track.history.anchor
    if room_bytes is None or anchor is None or len(blocks) <= WINDOW_BLOCKS[0]:
        return None
    lasted_seconds = blocks[-1].seconds - blocks[0].seconds
    rise_bytes = blocks[-1].floor_bytes - blocks[0].floor_bytes
    usable_bytes = max(0.0, room_bytes - OUT_OF_MEMORY_BYTES)
    longest_left_seconds = min(STRAIGHT_LEFT_SECONDS, lasted_seconds / SOON_SHARE)
    # A survey is expensive, so only growth that is fast enough is surveyed.
    if rise_bytes > STARTUP_SHARE * anchor.floor_bytes:
        return None
    if usable_bytes * lasted_seconds > longest_left_seconds * max(0.0, rise_bytes):
        return None
    survey = survey_ring(ring, anchor)
    if survey is None or survey.retained_bytes[-1] < _find_full_pools(track):
        return None
    begin = len(survey.blocks) - len(blocks)
    if survey.retained_bytes[-1] - survey.highest_bytes[begin] < STRAIGHT_BYTES:
        return None
    growth = cut_window(survey, begin)
    if not is_straight(growth):
        return None
    return WindowJudgement(Certainty.LEAKING, growth.rise_odds, growth)


def _find_full_pools(track: Track) -> float:
    """Return how much memory is held when the configured pools are full."""
    anchor = track.history.anchor
    assert anchor is not None  # noqa: S101 - it is set before the first block
    return anchor.floor_bytes + POOL_OVERHEAD * track.bound_bytes


def _rank_judgement(judgement: WindowJudgement) -> tuple[Certainty, float]:
    return judgement.verdict, judgement.odds


def _raise_alarm(growth: Growth) -> LeakAlarm:
    """Return an alarm for this growth.

    The floors of the alarm's blocks are set to the retained memory.
    """
    began = replace(growth.blocks[0], floor_bytes=growth.retained_bytes[0])
    newest_rise = replace(growth.blocks[-1], floor_bytes=growth.retained_bytes[-1])
    sum_of_squares = growth.typical_step_bytes * growth.grown_bytes
    return LeakAlarm(
        began=began, newest_rise=newest_rise, peak=newest_rise, sum_of_squares=sum_of_squares
    )


def _judge_windows(
    survey: RingSurvey, track: Track, origin: Block, room_bytes: float | None, *, has_steps: bool
) -> Iterator[WindowJudgement]:
    """Yield the judgement of each window that has grown enough.

    `has_steps` is whether windows of large steps are also judged in this ring. If a configured pool
    may still be filling, growth is at most a warning.
    """
    anchor = track.history.anchor
    assert anchor is not None  # noqa: S101 - it is set before the first block
    worst = Certainty.GROWING
    if survey.retained_bytes[-1] >= _find_full_pools(track):
        worst = Certainty.LEAKING

    for block_count in reversed(WINDOW_BLOCKS):
        begin = len(survey.blocks) - 1 - block_count
        if begin < 0:
            continue
        if survey.retained_bytes[-1] - survey.highest_bytes[begin] < LEAST_GROWTH_BYTES:
            continue
        growth = cut_window(survey, begin)
        if growth.rise_count < LEAST_RISES or has_ended(growth):
            continue
        if growth.rise_odds >= LEAST_RISE_ODDS or is_steady(growth):
            # E-folds are counted from the start of the stretch, even after load has doubled. An
            # earlier warm-up therefore still makes an alarm less likely.
            odds = min(WITNESS_ODDS_LIMIT, growth.rise_odds)
            odds += min(WITNESS_ODDS_LIMIT, weigh_pace(growth, anchor))
            verdict = _judge_even(growth, odds, track, room_bytes)
            if verdict is Certainty.LEAKING and is_busiest(growth, track):
                is_warning = growth.lasted_seconds >= GROWING_SECONDS
                verdict = Certainty.GROWING if is_warning else Certainty.NONE
            yield WindowJudgement(min(worst, verdict), odds, growth)

    if not has_steps:
        return
    # A window of large steps may begin anywhere since the origin. Therefore, only one ring is
    # searched for windows of large steps: the ring with the shortest blocks that reaches back to
    # the origin.
    falls_bytes = (fall_bytes for _, fall_bytes in list_falls(track.history.rings))
    largest_fall_bytes = max(falls_bytes, default=0.0)
    for growth in find_step_windows(survey):
        # The rising part of a slow sawtooth looks like steps, but is released later on.
        if growth.grown_bytes >= largest_fall_bytes and not has_ended(growth):
            verdict, odds = judge_steps(growth, track, origin, room_bytes)
            # The pace of a few steps varies by chance.
            has_pace = room_bytes is None or growth.rise_count >= STEADY_BLOCKS
            if verdict is Certainty.LEAKING and has_pace and is_fading(track):
                verdict = Certainty.GROWING
            yield WindowJudgement(min(worst, verdict), odds, growth)


def is_busiest(growth: Growth, track: Track) -> bool:
    """Return whether a new maximum of the load explains growth of under an hour.

    Returns False for steady growth, because memory that follows load slows down. Also returns False
    if the engine has served for less time than the growth lasted.
    """
    if growth.lasted_seconds >= LEAKING_SECONDS or is_steady(growth):
        return False
    # Each block of the longest ring lasts about a quarter of an hour.
    earlier_rates = [
        _measure_load((block, later))
        for block, later in pairwise(track.history.rings[-1].blocks)
        if later.seconds <= growth.blocks[0].seconds
    ]
    return bool(earlier_rates) and (
        _measure_load(growth.blocks) > BUSIEST_RATIO * max(earlier_rates)
    )


def _judge_even(growth: Growth, odds: float, track: Track, room_bytes: float | None) -> Certainty:
    """Return the verdict on even growth.

    `odds` is the sum of the log odds of rises and pace. An alarm is raised, whatever the cause, if
    growth has lasted longer than the time until memory is full. A single large rise does not
    shorten the time until memory is full. In the first minutes of a run, new demands are likely.
    During these minutes, the growth must also be steady.
    """
    # A single large demand must not shorten the time until memory is full, so the rises are
    # clipped.
    trend_bytes = sum(clip_rises(growth, LARGE_BYTES))
    usable_bytes: float = ASSUMED_ROOM_BYTES
    if room_bytes is not None:
        usable_bytes = max(0.0, room_bytes - OUT_OF_MEMORY_BYTES)
    left_seconds = usable_bytes / trend_bytes * growth.lasted_seconds
    is_urgent = _is_soon_full(growth, left_seconds) and is_steady(growth)
    is_likely = growth.rise_odds >= LEAST_RISE_ODDS and odds >= GROWING_ODDS_SUM
    if not (is_urgent or is_likely):
        return Certainty.NONE
    if trend_bytes < LEAST_GROWTH_BYTES or not is_even(growth):
        return Certainty.NONE
    if is_urgent:
        return Certainty.LEAKING
    if room_bytes is not None and looks_like_start(growth, track):
        return Certainty.GROWING if growth.lasted_seconds >= GROWING_SECONDS else Certainty.NONE
    is_long = has_lasted(growth, left_seconds, is_room_known=room_bytes is not None)
    return _judge_likely(growth, odds, left_seconds, track, is_long=is_long)


def looks_like_start(growth: Growth, track: Track) -> bool:
    """Return whether memory grew by so much in less than an hour that a process is starting.

    If the holders of a card are unknown, this may be another process that loads its weights.
    """
    anchor = track.history.anchor
    assert anchor is not None  # noqa: S101 - it is set before the first block
    is_short = growth.lasted_seconds < LEAKING_SECONDS
    return is_short and growth.grown_bytes > STARTUP_SHARE * anchor.floor_bytes


def is_fading(track: Track, *, by_either: bool = False) -> bool:
    """Return whether growth has slowed down, measured both per unit of time and per request.

    If `by_either` is true, slowing down by one of the two measures is sufficient.

    The time since the first quarter of the run is divided into thirds. Growth in the last two
    thirds is compared with growth in the first third. On a straight line, the growth in the last
    two thirds is twice as large. On a logarithmic curve, both are equal. Memory with a bound grows
    less in the last two thirds. The difference shows once the run has lasted about as long as
    filling up to the bound takes. The first quarter of the run is ignored, because it is the
    warm-up.
    """
    anchor = track.history.anchor
    assert anchor is not None  # noqa: S101 - it is set before the first block
    quarter_seconds = anchor.seconds + (track.clock.now_seconds - anchor.seconds) / 4
    blocks = _find_reaching_ring(track.history.rings, quarter_seconds).blocks
    rises_bytes = [later - earlier for earlier, later in pairwise(find_retained(blocks))]
    rising = [rise_bytes for rise_bytes in rises_bytes if rise_bytes >= RISE_BYTES]
    # A large demand early in the run does not mean that a leak slowed down.
    limit_bytes = CLIP_MEDIANS * median(rising) if rising else 0.0
    clipped_bytes = [min(limit_bytes, rise_bytes) for rise_bytes in rises_bytes]
    slowdowns = []
    for origin, axis in (
        (anchor.seconds, [block.seconds for block in blocks]),
        (anchor.requests, [block.requests for block in blocks]),
    ):
        begin = max(axis[0], origin + (axis[-1] - origin) / 4)
        begin_number = bisect_left(axis, begin)
        middle_number = bisect_left(axis, begin + (axis[-1] - begin) / 3)
        earlier_bytes = sum(clipped_bytes[begin_number:middle_number])
        later_bytes = sum(clipped_bytes[middle_number:])
        # An axis that spans nothing shows no growth.
        keeps_pace = later_bytes > 0 and later_bytes >= KEPT_PACE * earlier_bytes
        slowdowns.append(not keeps_pace)
    return any(slowdowns) if by_either else all(slowdowns)


def _is_soon_full(growth: Growth, left_seconds: float) -> bool:
    """Return whether growth has lasted for a share of the time until memory is full.

    If the result is True, no odds are required.
    """
    left_share = SOON_SHARE if growth.lasted_seconds < LEAKING_SECONDS else LATE_SHARE
    return left_share * left_seconds <= growth.lasted_seconds


def _judge_likely(
    growth: Growth, odds: float, left_seconds: float, track: Track, *, is_long: bool
) -> Certainty:
    """Return the verdict on even growth that is likely to be a leak.

    `is_long` is whether the growth has lasted long enough to raise an alarm.
    """
    if left_seconds > NO_CONCERN_SECONDS:
        return Certainty.NONE
    leaking_odds = LEAKING_ODDS_SUM
    if left_seconds > FAR_SECONDS:
        # Memory will last for months. An alarm may wake somebody up, so it requires more certainty.
        leaking_odds = LEAKING_ODDS_SUM_IF_FAR
    is_certain = odds >= leaking_odds and is_long
    # Fading is checked last, because the check reads the whole run.
    if is_certain and not is_fading(track):
        return Certainty.LEAKING
    if growth.lasted_seconds < GROWING_SECONDS:
        return Certainty.NONE
    # More than half of the room is gone. With so little room remaining, the evidence for a warning
    # is sufficient for an alarm.
    if growth.lasted_seconds >= left_seconds:
        return Certainty.LEAKING
    return Certainty.GROWING
