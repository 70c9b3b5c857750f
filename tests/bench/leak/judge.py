"""One trace's score: what the detector reported about the series that leaks or might, against what is true."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from typing import Any

import plain
from oncall import APART_SECONDS, DAY_SECONDS, END_SECONDS, find_begins, leaked_at
from traces import Labelled

from vllm_headroom.model import Snapshot
from vllm_headroom_tools.history import LeakCourse, LeakReplay, Moment
from vllm_headroom_tools.trace import parse_snapshot

MIB = 2**20


def judge(trace: Labelled) -> dict[str, Any]:
    """Return the trace's row: what was found when, what was false, how good the figures were."""
    replay = LeakReplay()
    alarm_before_end: Moment | None = None
    out_of_memory = trace.truth["oom_at"]
    for sample in trace.samples:
        snapshot = parse_snapshot(sample)
        assert isinstance(snapshot, Snapshot), snapshot
        replay.step(snapshot)
        if out_of_memory is not None and sample["t"] <= out_of_memory - END_SECONDS:
            course = _find_course(replay, trace.truth["series"])
            alarm_before_end = None if course is None else course.last_alarm
    course = _find_course(replay, trace.truth["series"]) or LeakCourse()
    return score(course, alarm_before_end, trace.truth, read_series(trace))


def score(
    course: LeakCourse, alarm_before_end: Moment | None, truth: dict[str, Any], readings: list[plain.Reading]
) -> dict[str, Any]:
    """Return the row of a trace with this course.

    `alarm_before_end` has the figures of the alarm long enough before out-of-memory; None without one.
    """
    row = {key: truth[key] for key in ("scenario", "seed", "group", "leak", "ambiguous")}
    row |= _score_alarms(course, truth, readings)
    if not truth["leak"]:
        return row
    row |= _score_figures("first", course.first_alarm, truth)
    row |= _score_figures("last", alarm_before_end or course.last_alarm, truth)
    location = truth.get("location")
    if location is not None and course.first_alarm is not None:
        row["placed"] = course.first_alarm.location == location
    row["held"] = None
    out_of_memory = truth["oom_at"]
    if out_of_memory is not None and row["found"] and course.last_alarm is not None:
        row["held"] = course.last_alarm.seconds >= out_of_memory - END_SECONDS
    return row


def _find_course(replay: LeakReplay, series: str) -> LeakCourse | None:
    """Return the course of the first GPU (`gpu`), or of a host process by its role; None before any reading."""
    if series == "gpu":
        return next((course for _, _, course in replay.gpus), None)
    return next((course for role, course in replay.host if role == series), None)


def read_series(trace: Labelled) -> list[plain.Reading]:
    """Return the readings of the series in question."""
    return plain.read_series(trace.samples, trace.truth["series"])


def _score_alarms(course: LeakCourse, truth: dict[str, Any], readings: list[plain.Reading]) -> dict[str, Any]:
    """Return how many alarms and early warnings were false and, of a leak, when and how early it was found."""
    # Without a leak every alarm is false.
    onset = truth["onset"] if truth["leak"] else inf
    watched_until = truth["onset"] if truth["leak"] else truth["ends"]
    alarm_begins = find_begins(course.leaking, APART_SECONDS)
    warning_begins = find_begins(course.growing, APART_SECONDS)
    false_begins = [begin for begin in alarm_begins if begin < onset]
    false_minutes = [
        _measure_false_minutes(interval, truth, readings) for interval in course.leaking if interval[0] in false_begins
    ]
    row: dict[str, Any] = {
        "days": (watched_until - truth["started"]) / DAY_SECONDS,
        "false": len(false_begins),
        "early_false": sum(begin < onset for begin in warning_begins),
        "lasts_minutes": max(false_minutes, default=0.0),
    }
    if not truth["leak"]:
        return row
    true_begins = [begin for begin in alarm_begins if begin >= onset]
    row["found"] = bool(true_begins)
    row["onsets"] = sum(begin >= onset for begin, _ in course.leaking)
    # A warning or an alarm may begin again within an hour of a false one: each begin counts here.
    all_begins = find_begins(course.growing, 0) + find_begins(course.leaking, 0)
    first_true = min((begin for begin in all_begins if begin >= onset), default=None)
    if first_true is not None:
        row["early_mb"] = leaked_at(truth, first_true) / 1e6
    if true_begins:
        row["mb"] = leaked_at(truth, true_begins[0]) / 1e6
        row["minutes"] = (true_begins[0] - onset) / 60
    return row


def _measure_false_minutes(
    interval: tuple[float, float | None], truth: dict[str, Any], readings: list[plain.Reading]
) -> float:
    """Return the minutes a false alarm lasted after the last growth that stayed."""
    begin, end = interval
    if end is None:
        end = truth["ends"]
    # The lowest memory from each reading on: what was held then and not given back.
    retained: list[tuple[float, float]] = []
    lowest = inf
    for seconds, held_bytes, _ in reversed(readings):
        if seconds <= end:
            lowest = min(lowest, held_bytes)
            retained.append((seconds, lowest))
    newest_growth = begin
    for (seconds, retained_bytes), (_, earlier_bytes) in pairwise(retained):
        if retained_bytes - earlier_bytes >= MIB:
            newest_growth = max(begin, seconds)
            break
    return (end - newest_growth) / 60


def _score_figures(prefix: str, moment: Moment | None, truth: dict[str, Any]) -> dict[str, Any]:
    """Return how good the figures of an alarm were; nothing for a false alarm, or one without a rate."""
    row: dict[str, Any] = {}
    if moment is None or moment.seconds < truth["onset"] or moment.bytes_per_second is None:
        return row
    lasted_seconds = max(moment.seconds - truth["onset"], 1.0)
    real_rate = leaked_at(truth, moment.seconds) / lasted_seconds
    if truth["steady"] and real_rate > 0:
        row[f"{prefix}_error"] = abs(moment.bytes_per_second - real_rate) / real_rate
        if moment.bytes_per_second_lower is not None:
            row[f"{prefix}_covered"] = moment.bytes_per_second_lower <= real_rate <= moment.bytes_per_second_upper
    if truth["oom_at"] and moment.time_to_oom_seconds_lower is not None:
        row[f"{prefix}_in_time"] = moment.time_to_oom_seconds_lower <= truth["oom_at"] - moment.seconds
    return row


def judge_plain_rules(truth: dict[str, Any], readings: list[plain.Reading]) -> dict[str, Any]:
    """Return what the plain rules would have reported."""
    row: dict[str, Any] = {}
    for name, find_alarm in plain.RULES.items():
        alarm_seconds = find_alarm(readings)
        is_true = alarm_seconds is not None and truth["leak"] and alarm_seconds >= truth["onset"]
        row[f"{name}_found"] = is_true
        row[f"{name}_false"] = alarm_seconds is not None and not is_true
    return row
