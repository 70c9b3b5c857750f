"""Judge the limits on leaks.

The basis is the smallest leak that the detector would have found.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil
from typing import Final

from msgspec.structs import replace

from vllm_headroom.derive.leak.facts import Certainty, Observation, start_track
from vllm_headroom.derive.leak.track import observe
from vllm_headroom.units import MIB, format_duration, format_size
from vllm_headroom_tools.check.judgement import HOST_LEAK, LEAK, Judgement
from vllm_headroom_tools.check.record import (
    DetectorInput,
    MemorySeries,
    TraceRecord,
    find_doubt,
    pair_gpus,
)
from vllm_headroom_tools.conclusion import Conclusion
from vllm_headroom_tools.history import LeakCourse, LeakVerdict, Moment, judge_course

THOUSAND: Final = 1000
NONE_SEEN: Final = "none seen"
LONGER: Final = "record for longer, or send more requests"


def judge_gpu_leaks(
    record: TraceRecord, baseline: TraceRecord | None, limit_bytes: float
) -> Iterator[Judgement]:
    """Judge the leak per thousand requests on each GPU."""
    for series, baseline_series in pair_gpus(record, baseline):
        yield _judge_leak(LEAK, record, series, baseline_series, limit_bytes)


def judge_host_leaks(
    record: TraceRecord, baseline: TraceRecord | None, limit_bytes: float
) -> Iterator[Judgement]:
    """Judge the leak per thousand requests in the host memory of each role."""
    for role, series in sorted(record.host.items()):
        baseline_series = None if baseline is None else baseline.host.get(role)
        yield _judge_leak(HOST_LEAK, record, series, baseline_series, limit_bytes)


def _judge_leak(
    limit: str,
    record: TraceRecord,
    series: MemorySeries,
    baseline_series: MemorySeries | None,
    limit_bytes: float,
) -> Judgement:
    """Judge a series by its alarm.

    Without an alarm, the smallest detectable leak decides.
    """
    begin_seconds, end_seconds = record.replay.span
    leak_verdict, leak_reason = judge_course(series.course, end_seconds - begin_seconds)
    draft = Judgement(
        limit=limit,
        subject=series.name,
        verdict=Conclusion.CANNOT_TELL,
        leak_verdict=leak_verdict,
        highest_allowed=limit_bytes,
        value_text=NONE_SEEN,
    )
    if baseline_series is not None:
        draft = replace(
            draft,
            baseline=_compute_per_thousand(baseline_series.course.newest),
            baseline_text=_describe_course(baseline_series.course),
        )
    # If there are several alarms, the last one provides the best estimate.
    alarm = series.course.last_alarm
    if alarm is not None:
        return _judge_alarm(draft, alarm, limit_bytes)
    if leak_verdict is LeakVerdict.GROWING:
        return _judge_warning(draft, series.course, leak_reason)
    return _judge_quiet(draft, record, series, limit_bytes)


def _judge_alarm(draft: Judgement, alarm: Moment, limit_bytes: float) -> Judgement:
    """Judge an alarm by its estimated leak per request.

    The series fails if the estimate is above the limit or missing. It passes only if the entire
    95 % interval is within the limit. In all other cases, it cannot be judged.
    """
    per_thousand_bytes = _compute_per_thousand(alarm)
    rate = alarm.bytes_per_second or 0.0
    lower_rate = alarm.bytes_per_second_lower
    upper_rate = alarm.bytes_per_second_upper
    leaked_bytes = alarm.leaked_bytes
    reason = "the detector's alarm: it grows while no requests finish"
    # If memory grows without requests, the growth exceeds any per-request limit.
    if per_thousand_bytes is None or leaked_bytes is None:
        return replace(draft, verdict=Conclusion.NOT_GOOD, value_text="a leak", reason=reason)
    if rate <= 0 or lower_rate is None or upper_rate is None:
        return replace(draft, verdict=Conclusion.NOT_GOOD, value_text="a leak", reason=reason)

    # The detector only provides an interval for the rate over time. The interval per request has
    # the same relative width.
    lower_bytes = per_thousand_bytes * lower_rate / rate
    upper_bytes = per_thousand_bytes * upper_rate / rate
    bounds = f"{format_size(lower_bytes)} to {format_size(upper_bytes)}"
    leaked = format_size(leaked_bytes)
    reason = f"the detector's alarm; 95 %: {bounds}, {leaked} in all"
    if per_thousand_bytes > limit_bytes:
        verdict = Conclusion.NOT_GOOD
    elif upper_bytes <= limit_bytes:
        verdict = Conclusion.GOOD
    else:
        verdict = Conclusion.CANNOT_TELL
        reason += f"; {LONGER}"
    return replace(draft, verdict=verdict, value=per_thousand_bytes, value_text=None, reason=reason)


def _judge_warning(draft: Judgement, course: LeakCourse, reason: str) -> Judgement:
    """Judge a series with early warnings, which neither passes nor fails at any limit."""
    if course.warning is not None:
        reason = "an early warning; steady growth takes an hour or more to become an alarm"
    return replace(
        draft,
        value=_compute_per_thousand(course.newest),
        value_text=_describe_course(course),
        reason=f"{reason}: {LONGER}",
    )


def _judge_quiet(
    draft: Judgement, record: TraceRecord, series: MemorySeries, limit_bytes: float
) -> Judgement:
    """Judge a series that has neither an alarm nor a relevant early warning.

    The series passes if the detector would find a leak as large as the limit. The series cannot be
    judged if there is a doubt, or if the detector would have missed such a leak.
    """
    doubt = find_doubt(record, series.coverage, series.name)
    if doubt is not None:
        return replace(draft, reason=doubt)

    # The limit is per thousand requests, but the detector works with single requests.
    limit_per_request = limit_bytes / THOUSAND
    visible_per_request = find_smallest_visible(series.readings, limit_per_request)
    span = format_duration(record.coverage.seconds)
    extent = f"in {span} and {record.finished_requests.total:,.0f} requests"
    if visible_per_request == limit_per_request:
        reason = f"one of {format_size(limit_bytes)} or more would have been seen {extent}"
        return replace(draft, verdict=Conclusion.GOOD, reason=reason)
    reason = f"one at the limit would not have been seen {extent}"
    if visible_per_request is not None:
        visible = format_size(THOUSAND * visible_per_request)
        factor = visible_per_request / limit_per_request
        reason += f", only one of {visible} or more: record about {factor:.0f} times as many"
    return replace(draft, reason=reason)


def _describe_course(course: LeakCourse) -> str:
    """Return the detector's result for a series as text, with any known rate."""
    per_thousand_bytes = _compute_per_thousand(course.newest)
    if course.last_alarm is not None:
        return "a leak" if per_thousand_bytes is None else format_size(per_thousand_bytes)
    if not course.is_undecided:
        return NONE_SEEN
    if per_thousand_bytes is None:
        return "growing"
    return f"growing, {format_size(per_thousand_bytes)}"


def _compute_per_thousand(moment: Moment | None) -> float | None:
    """Return the leak in bytes per thousand requests.

    Returns None if `moment` is None. Also returns None if the leak per request is unknown or not
    above 0.
    """
    if moment is None or moment.bytes_per_request is None or moment.bytes_per_request <= 0:
        return None
    return THOUSAND * moment.bytes_per_request


ALLOCATION_BYTES: Final = 2 * MIB
"""The smallest amount that an allocator takes at a time (cudaMalloc, torch's small pool). Leaks
grow in steps of this size.
"""

DOUBLINGS: Final = 10
"""Our choice: after this many doublings of the added leak, the search gives up."""


def find_smallest_visible(
    readings: Sequence[DetectorInput], bytes_per_request: float
) -> float | None:
    """Return the smallest leak per request that the detector would find in these readings.

    A steady leak is added to the readings. The detector runs on the sum. The first leak that is
    tried is `bytes_per_request`, and each further leak is twice as large. The drift in the second
    half of the readings is subtracted from the added leak. The drift may itself be a leak, or it
    may hide one. Returns None if the detector finds no such leak or the drift is unknown.
    """
    drift = _measure_drift(readings)
    if drift is None:
        return None
    for power in range(DOUBLINGS + 1):
        leak = bytes_per_request * (1 << power)
        if leak > drift and _can_see(readings, leak - drift):
            return leak
    return None


def _measure_drift(readings: Sequence[DetectorInput]) -> float | None:
    """Return the floor's change per request in the second half of the readings.

    A floor is the lowest memory within an eighth of the readings. Returns None if there are no
    memory readings or no requests.
    """
    eighth = len(readings) // 8
    half = len(readings) // 2
    # Only the second half is used. In the first half, the floor also moves because of the warm-up.
    middle_floor_bytes = _find_floor(readings[half - eighth : half])
    last_floor_bytes = _find_floor(readings[len(readings) - eighth :])
    if middle_floor_bytes is None or last_floor_bytes is None:
        return None
    later_half = pairwise(readings[half:])
    requests = sum(max(0.0, later - sooner) for (_, sooner), (_, later) in later_half)
    if not requests:
        return None
    return abs(last_floor_bytes - middle_floor_bytes) / requests


def _find_floor(readings: Sequence[DetectorInput]) -> int | None:
    """Return the fewest bytes held in any reading, or None if all are unknown."""
    held_bytes = [
        observation.held_bytes for observation, _ in readings if observation.held_bytes is not None
    ]
    return min(held_bytes, default=None)


def _can_see(readings: Sequence[DetectorInput], bytes_per_request: float) -> bool:
    """Return whether the detector finds a steady leak added to the readings."""
    track = start_track(readings[0][0].seconds)
    for observation, requests in readings:
        leaked_bytes = ceil(requests * bytes_per_request / ALLOCATION_BYTES) * ALLOCATION_BYTES
        track = observe(track, _add_leak(observation, leaked_bytes))
        if track.verdict is Certainty.LEAKING:
            return True
    return track.verdict is Certainty.GROWING


def _add_leak(observation: Observation, leaked_bytes: int) -> Observation:
    """Return an observation with this much more memory held and less memory free."""
    held_bytes = observation.held_bytes
    room_bytes = observation.room_bytes
    return replace(
        observation,
        held_bytes=None if held_bytes is None else held_bytes + leaked_bytes,
        room_bytes=None if room_bytes is None else room_bytes - leaked_bytes,
    )
