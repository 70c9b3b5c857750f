"""Read what the engine's log shows about an exit, and list the log's last lines."""

from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from typing import Final

from vllm_headroom.derive.engine_log import describe_failure, describe_place, describe_time
from vllm_headroom.model import LogEnding
from vllm_headroom.model.start import (
    LOGGED_END_SECONDS,
    STALE_LOG_SECONDS,
    EngineLog,
    EngineStart,
    LogEvent,
    LogTime,
)
from vllm_headroom.units import HOUR_SECONDS, to_datetime
from vllm_headroom.vocabulary import LogEventKind, LogFailureKind, LogRemarkKind
from vllm_headroom_tools.engine_log import find_decisive_start

LAST_SECONDS: Final = 60.0
"""The report shows this much of the end of the log."""

MOST_SHOWN_EVENTS: Final = 16
"""Our choice: the largest number of log lines that are shown."""

LARGEST_ZONE_SECONDS: Final = 14 * HOUR_SECONDS
"""The largest offset of any time zone from UTC."""

REMARK_WORDS: Final = {
    LogRemarkKind.PREEMPTION: "the KV cache was full: requests are computed again",
    LogRemarkKind.SWAP: "parts of the KV cache are swapped to host memory",
    LogRemarkKind.FALLBACK: "a slower implementation is used",
    LogRemarkKind.EAGER: "CUDA graphs are off",
    LogRemarkKind.PADDING: "layers are padded",
    LogRemarkKind.CONTEXT_REDUCED: "the longest request was shortened to what fits",
    LogRemarkKind.BLOCKED: "a worker does not answer",
}
"""A one-line explanation of each warning in the log."""


def find_start(log: EngineLog, end_seconds: float | None) -> EngineStart | None:
    """Return the engine start that ended with this exit, by the times in the log.

    If the log or the exit has no known time, returns the newest failed start. If none failed,
    returns the newest start. Returns None if every start in the log ended at a different time.
    """
    if end_seconds is None:
        return find_decisive_start(log.starts)
    has_times = False
    nearest_start = None
    nearest_seconds = LOGGED_END_SECONDS
    for start in log.starts:
        seconds = place_time(find_end_time(start), end_seconds)
        if seconds is None:
            continue
        has_times = True
        distance_seconds = abs(seconds - end_seconds)
        if distance_seconds <= nearest_seconds:
            nearest_seconds = distance_seconds
            nearest_start = start
    return nearest_start if has_times else find_decisive_start(log.starts)


def find_end_time(start: EngineStart) -> LogTime:
    """Return when a start ended.

    The end is the time of its failure or else of its last line.
    """
    failure = start.root_failure
    has_time = failure is not None and failure.time != LogTime()
    return failure.time if failure is not None and has_time else start.end


def build_log_ending(start: EngineStart, end_seconds: float) -> LogEnding | None:
    """Return what the log of a start shows about an exit.

    Returns None if the log has no failure and its last line is too old.
    """
    failure = start.root_failure
    seconds = place_time(find_end_time(start), end_seconds)
    if failure is not None or start.is_stopped:
        return LogEnding(failure=failure, is_stopped=start.is_stopped, seconds=seconds)
    if seconds is None or seconds < end_seconds - STALE_LOG_SECONDS:
        return None
    return LogEnding(seconds=seconds)


def place_time(time: LogTime, near_seconds: float) -> float | None:
    """Return a line's time in seconds since the epoch.

    Returns None if the line has no time. The engine logs neither the year nor the time zone. The
    time zone is assumed to be a whole number of hours from UTC, and is chosen so that the time is
    closest to `near_seconds`.
    """
    if time.seconds is not None:
        return time.seconds
    if time.clock is None:
        return None
    year = to_datetime(near_seconds).year
    candidates = []
    # Around New Year, a line may be from the year before or after.
    for near_year in (year - 1, year, year + 1):
        try:
            moment = datetime.strptime(f"{near_year} {time.clock}Z", "%Y %m-%d %H:%M:%S%z")
        except ValueError:
            continue
        candidates.append(moment.timestamp())
    if not candidates:
        return None
    seconds = min(candidates, key=lambda candidate: abs(candidate - near_seconds))
    distance_seconds = seconds - near_seconds
    # No time zone explains such a large difference, so the line is from another day.
    if abs(distance_seconds) > LARGEST_ZONE_SECONDS + LOGGED_END_SECONDS:
        return seconds
    return seconds - HOUR_SECONDS * round(distance_seconds / HOUR_SECONDS)


def list_log_lines(start: EngineStart) -> Iterator[tuple[str, str]]:
    """Yield the time and the meaning of each line in the last minute, oldest first.

    Lines about requests, lines without an event, and lines that every process repeats are omitted.
    """
    events = start.recent_events
    times = [_read_seconds(event.time) for event in events]
    newest_seconds = max((time for time in times if time is not None), default=None)
    shown_events = []
    shown_texts: set[str] = set()
    seconds = None
    for event, event_seconds in zip(events, times, strict=True):
        # A line without a time gets the time of the preceding line.
        seconds = event_seconds or seconds
        is_old = (
            seconds is not None
            and newest_seconds is not None
            and newest_seconds - seconds > LAST_SECONDS
        )
        text = describe_event(event)
        if is_old or text is None:
            continue
        is_repeated = text in shown_texts and event.kind is not LogEventKind.LOAD
        shown_texts.add(text)
        if not is_repeated:
            shown_events.append((describe_time(event.time) or f"line {event.line_number:,}", text))
    # A crash logs hundreds of lines within a second. The last lines are closest to the end.
    yield from shown_events[-MOST_SHOWN_EVENTS:]


def _read_seconds(time: LogTime) -> float | None:
    """Return a number that orders the times within one log.

    Returns None if the line has no time.
    """
    if time.seconds is not None or time.clock is None:
        return time.seconds
    with suppress(ValueError):
        # 2024 is a leap year, in which every date exists.
        return datetime.strptime(f"2024 {time.clock}Z", "%Y %m-%d %H:%M:%S%z").timestamp()
    return None


def describe_event(event: LogEvent) -> str | None:
    """Return the meaning of a line.

    Returns None if the line is irrelevant to an exit.
    """
    figures = event.figures
    if event.kind is LogEventKind.FAILURE and event.failure is not None:
        # The cause may be on a different line of the log.
        if event.failure.kind is LogFailureKind.ENGINE_DIED:
            return "the engine's core exited"
        return f"{describe_failure(event.failure)} ({describe_place(event.failure)})"
    if event.kind is LogEventKind.LOAD:
        running = figures.get("running_requests", 0.0)
        waiting = figures.get("waiting_requests", 0.0)
        used_percent = 100 * figures.get("kv_cache_used_ratio", 0.0)
        return f"{running:,.0f} running, {waiting:,.0f} waiting, KV cache {used_percent:.0f} % used"
    if event.kind is LogEventKind.REMARK and event.remark is not None:
        return REMARK_WORDS[event.remark]
    return WORDS.get(event.kind)


WORDS: Final = {
    LogEventKind.START: "the engine starts",
    LogEventKind.SERVING: "the engine serves",
    LogEventKind.STOP: "the engine shuts down on request",
}
"""The meanings of the other log lines, by kind."""
