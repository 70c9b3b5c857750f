"""One trace's score as the person on call sees it: what a program reported, against what is true of the trace.

README.md has the rules. Times are seconds since the epoch, as in the trace.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import exp, inf, lgamma, log
from typing import Any

LEVELS = ("warning", "critical", "page")

END_SECONDS = 600.0
"""The last word is taken this long before the end."""

APART_SECONDS = 3600.0
"""Alarms closer than this are one."""

PAGE_SECONDS = 3600.0
"""A leak pages while less than this is left until out-of-memory."""

DAY_SECONDS = 86_400.0

YEAR_DAYS = 365.25

Interval = tuple[float, float]
"""Begin and end; the end is infinite where the alarm lasts to the end of the trace."""


class ReportError(Exception):
    """What a program printed, or how it ended, cannot be scored: one line that says why."""


@dataclass(frozen=True)
class Report:
    """What a program printed about the series in question."""

    growing: list[Interval]
    leaking: list[Interval]
    pages: list[Interval] | None
    """None where the program does not print them: they are then found by shorter traces."""

    first_leaking: dict[str, Any] | None
    last_leaking: dict[str, Any] | None


def read_report(printed: Any, series: str) -> Report:
    """Return the report about the first GPU, or about a host process by its role; raise ReportError for another shape.

    `printed` is the object of `vllm-headroom replay --json`, or what this has in its field `data`.
    """
    entry = _find_entry(printed, series)
    pages = entry.get("page_intervals")
    return Report(
        growing=_read_intervals(entry.get("growing_intervals")),
        leaking=_read_intervals(entry.get("leaking_intervals")),
        pages=None if pages is None else _read_intervals(pages),
        first_leaking=_read_moment(entry.get("first_leaking")),
        last_leaking=_read_moment(entry.get("last_leaking")),
    )


def _find_entry(printed: Any, series: str) -> dict[str, Any]:
    """Return what the program printed about the series: an empty object where that is nothing."""
    if isinstance(printed, dict) and isinstance(printed.get("data"), dict):
        printed = printed["data"]
    if not isinstance(printed, dict) or not isinstance(printed.get("gpus"), list):
        message = "it printed no object with a list `gpus`"
        raise ReportError(message)
    entries = printed["gpus"] if series == "gpu" else printed.get("host") or []
    for entry in entries:
        if not isinstance(entry, dict):
            message = "an entry of `gpus` or `host` is no object"
            raise ReportError(message)
    for entry in entries:
        if series == "gpu" or entry.get("process") == series:
            return dict(entry)
    return {}


def _read_intervals(printed: Any) -> list[Interval]:
    try:
        return sorted((float(begin), inf if end is None else float(end)) for begin, end in printed or ())
    except (TypeError, ValueError):
        message = f"{printed!r:.60} is no list of intervals [begin, end]"
        raise ReportError(message) from None


def _read_moment(printed: Any) -> dict[str, Any] | None:
    if printed is None:
        return None
    if not isinstance(printed, dict) or not isinstance(printed.get("t"), int | float):
        message = f"{printed!r:.60} is no object with a time `t`"
        raise ReportError(message)
    return printed


def is_paging(report: Report, now: float) -> bool:
    """Return whether a report on a trace that ends now says leaking, with less than an hour left."""
    figures = report.last_leaking
    if figures is None or figures["t"] < now:
        return False
    left_seconds = figures.get("time_to_oom_seconds")
    return left_seconds is not None and left_seconds < PAGE_SECONDS


def find_pages(report: Report, times: list[float], report_until: Callable[[int], Report]) -> list[Interval]:
    """Return when the program pages; `report_until` gives its report on the trace up to and with a sample's number.

    In each interval of leaking, the page is looked for at the last sample, then its begin by halving what is before.
    """
    if report.pages is not None:
        return report.pages
    pages = []
    for begin, end in report.leaking:
        low = bisect_left(times, begin)
        high = min(bisect_left(times, end), len(times)) - 1
        if high < low or not is_paging(report_until(high), times[high]):
            continue
        # The sample at `high` pages; the first that does is there or before it.
        while low < high:
            middle = (low + high) // 2
            if is_paging(report_until(middle), times[middle]):
                high = middle
            else:
                low = middle + 1
        pages.append((times[high], end))
    return pages


def score_report(
    report: Report, pages: list[Interval], at_page: dict[str, Any] | None, truth: dict[str, Any]
) -> dict[str, Any]:
    """Return a trace's row; `at_page` has the figures that the program gave when the page first fired."""
    intervals = {
        "warning": join_intervals([*report.growing, *report.leaking], 0.0),
        "critical": report.leaking,
        "page": pages,
    }
    begins = {level: find_begins(intervals[level], APART_SECONDS) for level in LEVELS}
    is_leak = truth["leak"]
    # Without a leak every alarm is false.
    onset = truth["onset"] if is_leak else inf
    watched_until = onset if is_leak else truth["ends"]
    row: dict[str, Any] = {key: truth[key] for key in ("scenario", "seed", "group", "leak", "ambiguous")}
    row["days"] = (watched_until - truth["started"]) / DAY_SECONDS
    row["false"] = {level: sum(begin < onset for begin in begins[level]) for level in LEVELS}
    if not is_leak:
        return row
    out_of_memory = truth["oom_at"]
    row["fills"] = out_of_memory is not None
    # Without a last time left of host memory, nothing says whether that pages.
    row["page_known"] = truth["series"] == "gpu" or report.pages is not None or report.last_leaking is not None
    row["levels"] = {}
    figures = {"critical": report.first_leaking, "page": at_page}
    for level in LEVELS:
        true_begins = [begin for begin in begins[level] if begin >= onset]
        if not true_begins:
            continue
        entry = _describe_alarm(true_begins[0], intervals[level], truth)
        if out_of_memory is not None:
            entry |= _judge_time_left(figures.get(level), onset, out_of_memory)
        row["levels"][level] = entry
    all_intervals = [*intervals["warning"], *intervals["critical"], *intervals["page"]]
    incidents = join_intervals(all_intervals, APART_SECONDS)
    row["notifications"] = sum(begin >= onset for begin, _ in incidents)
    return row


def _describe_alarm(begin: float, intervals: list[Interval], truth: dict[str, Any]) -> dict[str, Any]:
    """Return when a leak's first alarm came, and whether an alarm still lasted just before the end."""
    out_of_memory = truth["oom_at"]
    entry = {
        "minutes": (begin - truth["onset"]) / 60,
        "leaked_mb": leaked_at(truth, begin) / 1e6,
        "lead_minutes": None,
        "lasts": True,
    }
    if out_of_memory is not None:
        _, newest_end = intervals[-1]
        entry["lead_minutes"] = (out_of_memory - begin) / 60
        entry["lasts"] = newest_end > out_of_memory - END_SECONDS
    return entry


def _judge_time_left(figures: dict[str, Any] | None, onset: float, out_of_memory: float) -> dict[str, Any]:
    """Return how the time left compares with the real one; nothing where it is unknown or of a false alarm."""
    judged: dict[str, Any] = {}
    if figures is None or figures["t"] < onset:
        return judged
    left_seconds = out_of_memory - figures["t"]
    likely_seconds = figures.get("time_to_oom_seconds")
    earliest_seconds = figures.get("time_to_oom_seconds_lower")
    if likely_seconds is not None and left_seconds > 0:
        judged["time_left_ratio"] = likely_seconds / left_seconds
    if earliest_seconds is not None:
        judged["earliest_holds"] = earliest_seconds <= left_seconds
    return judged


def join_intervals(intervals: Iterable[Interval], apart: float) -> list[Interval]:
    """Return the intervals, in order, with those joined that are no further apart than this."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin - joined[-1][1] <= apart:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def find_begins(intervals: Iterable[tuple[float, float | None]], apart: float) -> list[float]:
    """Return the begins of the alarms, where one within `apart` of the end of the one before is the same."""
    begins: list[float] = []
    previous_end = -inf
    for begin, end in intervals:
        if begin - previous_end > apart:
            begins.append(begin)
        previous_end = begin if end is None else end
    return begins


def leaked_at(truth: dict[str, Any], t: float) -> float:
    """Return the truly leaked bytes at time t, in the current run of the engine."""
    leaked_bytes: float = truth["leaked_bytes"][max(0, bisect_right(truth["t"], t) - 1)]
    return leaked_bytes


def bound_rate(events: int, days: float) -> tuple[float, float, float]:
    """Return events per year, and Garwood's exact 95 % interval of a Poisson rate."""
    lower = _find_mean(events - 1, 0.975) if events else 0.0
    upper = _find_mean(events, 0.025)
    return events * YEAR_DAYS / days, lower * YEAR_DAYS / days, upper * YEAR_DAYS / days


def _find_mean(events: int, share: float) -> float:
    """Return the mean at which a Poisson count is at most `events` with this probability, by halving."""
    low = 0.0
    high = 2.0 * events + 20.0
    for _ in range(100):
        mean = (low + high) / 2
        at_most = sum(exp(count * log(mean) - mean - lgamma(count + 1)) for count in range(events + 1))
        if at_most > share:
            low = mean
        else:
            high = mean
    return (low + high) / 2
