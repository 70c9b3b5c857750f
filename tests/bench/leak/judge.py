"""One trace's score: what the detector reported about the series that leaks or might, against what is true."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import plain
from oncall import APART_SECONDS, END_SECONDS, find_begins, leaked_at
from traces import Labelled

from vllm_headroom.model import Snapshot
from vllm_headroom_tools.history import LeakCourse, LeakReplay, Moment
from vllm_headroom_tools.trace import parse_snapshot

MIB = 2**20


def judge(trace: Labelled) -> dict[str, Any]:
    """Return the trace's row: what was found when, what was false, how good the figures were."""
    watch, before_end = LeakReplay(), None
    ends = trace.truth["oom_at"]
    for sample in trace.samples:
        snapshot = parse_snapshot(sample)
        assert isinstance(snapshot, Snapshot), snapshot
        watch.step(snapshot)
        if ends is not None and sample["t"] <= ends - END_SECONDS:
            course = _course(watch, trace.truth["series"])
            before_end = course.last_alarm if course is not None else None
    course = _course(watch, trace.truth["series"]) or LeakCourse()
    return score(course, before_end, trace.truth, read_series(trace))


def score(
    course: LeakCourse, before_end: Moment | None, truth: dict[str, Any], readings: list[plain.Reading]
) -> dict[str, Any]:
    """Return the row of a trace with this course; `before_end` is the last moment long enough before out-of-memory."""
    row = {key: truth[key] for key in ("scenario", "seed", "group", "leak", "ambiguous")}
    row |= _alarms(course, truth, readings)
    if truth["leak"]:
        row |= _figures("first", course.first_alarm, truth) | _figures("last", before_end or course.last_alarm, truth)
        where, ends = truth.get("location"), truth["oom_at"]
        if where is not None and course.first_alarm is not None:
            row["placed"] = course.first_alarm.location == where
        row["held"] = None
        if ends is not None and row["found"] and course.last_alarm is not None:
            row["held"] = course.last_alarm.seconds >= ends - END_SECONDS
    return row


def _course(watch: LeakReplay, series: str) -> LeakCourse | None:
    if series == "gpu":
        return next((course for _, _, course in watch.gpus), None)
    return next((course for role, course in watch.host if role == series), None)


def read_series(trace: Labelled) -> list[plain.Reading]:
    """Return the readings of the series in question."""
    return plain.read_series(trace.samples, trace.truth["series"])


def _alarms(course: LeakCourse, truth: dict[str, Any], readings: list[plain.Reading]) -> dict[str, Any]:
    leak, onset = truth["leak"], truth["onset"]
    rises, early = find_begins(course.leaking, APART_SECONDS), find_begins(course.growing, APART_SECONDS)
    false = [edge for edge in rises if not leak or edge < onset]
    row: dict[str, Any] = {
        "days": ((onset if leak else truth["ends"]) - truth["started"]) / 86_400,
        "false": len(false),
        "early_false": sum(not leak or edge < onset for edge in early),
        "lasts_minutes": max(
            (_lasts(each, truth, readings) for each in course.leaking if each[0] in false), default=0.0
        ),
    }
    if leak:
        hits = [edge for edge in rises if edge >= onset]
        soon = [edge for edge in (*find_begins(course.growing, 0), *find_begins(course.leaking, 0)) if edge >= onset]
        row["found"] = bool(hits)
        row["onsets"] = sum(begin >= onset for begin, _ in course.leaking)
        if soon:
            row["early_mb"] = leaked_at(truth, min(soon)) / 1e6
        if hits:
            row |= {"mb": leaked_at(truth, hits[0]) / 1e6, "minutes": (hits[0] - onset) / 60}
    return row


def _lasts(interval: tuple[float, float | None], truth: dict[str, Any], readings: list[plain.Reading]) -> float:
    """Return the minutes a false alarm lasted after the last growth that stayed."""
    end = truth["ends"] if interval[1] is None else interval[1]
    within = [(seconds, held) for seconds, held, _ in readings if seconds <= end]
    least, grew = float("inf"), interval[0]
    floors = []
    for seconds, held in reversed(within):
        least = min(least, held)
        floors.append((seconds, least))
    for (seconds, floor), (_, before) in pairwise(floors):
        if floor - before >= MIB:
            grew = max(grew, seconds)
            break
    return (end - grew) / 60


def _figures(which: str, said: Moment | None, truth: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    if said is None or said.seconds < truth["onset"] or said.bytes_per_second is None:
        return row
    real = leaked_at(truth, said.seconds) / max(said.seconds - truth["onset"], 1.0)
    if truth["steady"] and real > 0:
        row[f"{which}_error"] = abs(said.bytes_per_second - real) / real
        if said.bytes_per_second_lower is not None:
            row[f"{which}_covered"] = said.bytes_per_second_lower <= real <= said.bytes_per_second_upper
    if truth["oom_at"] and said.time_to_oom_seconds_lower is not None:
        row[f"{which}_in_time"] = said.time_to_oom_seconds_lower <= truth["oom_at"] - said.seconds
    return row


def judge_plain_rules(truth: dict[str, Any], readings: list[plain.Reading]) -> dict[str, Any]:
    """Return what the plain rules would have said."""
    row: dict[str, Any] = {}
    rules: dict[str, Callable[[list[plain.Reading]], float | None]] = {
        "linear": plain.extrapolated,
        "trend": plain.trending,
        "squares": plain.significant,
        "challenger": plain.challenge,
    }
    for name, rule in rules.items():
        told = rule(readings)
        false = told is not None and (not truth["leak"] or told < truth["onset"])
        row |= {f"{name}_found": told is not None and not false, f"{name}_false": false}
    return row
