"""What the detector would have reported about leaks that were reported in public.

The traces are synthesised: straight lines through the figures a report gives, at ten requests a second, without the
report's own noise and warm-up. They say when a growth of that pace is reported, and nothing of how it looked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final

import pytest

from tests.assets.console import ROOT
from tests.assets.test_docs_tables import between
from tests.conftest import Golden
from tests.unit.derive.leak.stretches import HOUR, RATE, STEP, Course, follow, segments
from vllm_headroom.derive.leak.facts import Certainty, Observation

GB: Final = 1e9
GIB: Final = 2**30
MINUTE: Final = 60.0
FLAT_HOURS: Final = 4.0
"""How long a growth that was seen to stop is followed afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A report's figures: what was held at first and at last, in how many hours, and what it reports about the end.

    `room_bytes` is what was left at first; None without a limit of host memory. `assumed` names what the report
    does not say.
    """

    source: str
    says: str
    first_bytes: float
    last_bytes: float
    hours: float
    room_bytes: float | None = None
    bounded: bool = False
    assumed: str = ""


REPORTS: Final = (
    Report(
        source="vllm-project/vllm#44490",
        says="host, a list that was not drained: 6.00 to 6.57 GiB in 12 h",
        first_bytes=6.00 * GIB,
        last_bytes=6.57 * GIB,
        hours=12,
    ),
    Report(
        source="vllm-project/vllm#52089",
        says="host, 1.4 to 2.3 kB per request at 10 requests a second",
        first_bytes=8 * GIB,
        last_bytes=8 * GIB + 1400 * RATE * 12 * HOUR,
        hours=12,
        assumed="the slower pace; 8 GiB at first, 12 h",
    ),
    Report(
        source="Mistral AI, on vLLM with NIXL",
        says="host, mapped outside the heap: 400 MB a minute",
        first_bytes=20 * GIB,
        last_bytes=20 * GIB + 400e6 * 180,
        hours=3,
        assumed="20 GiB at first, 3 h",
    ),
    Report(
        source="vllm-project/vllm-ascend#15193",
        says="host, a worker: 234.076 to 266.987 GiB in 16 h 45 min",
        first_bytes=234.076 * GIB,
        last_bytes=266.987 * GIB,
        hours=16.75,
    ),
    Report(
        source="triton-inference-server/server#7035",
        says="host, linear: 12 to 15 GB at first, 80 GB after 12 h",
        first_bytes=15 * GB,
        last_bytes=80 * GB,
        hours=12,
    ),
    Report(
        source="ollama/ollama#18106",
        says="host, by request, most of it swapped out: 0.30 to 9.35 GiB in 5.5 h",
        first_bytes=0.30 * GIB,
        last_bytes=9.35 * GIB,
        hours=5.5,
    ),
    Report(
        source="sgl-project/sglang#7340",
        says="GPU, pixel values that were kept: 20 GB free at first, 7 GB after half an hour",
        first_bytes=76 * GB,
        last_bytes=96 * GB,
        hours=0.5 * 20 / 13,
        room_bytes=20 * GB,
    ),
    Report(
        source="ggml-org/llama.cpp#28933",
        says="host, a table that is read in: 6.9 GiB in 1.5 h, then flat",
        first_bytes=5.3 * GIB,
        last_bytes=12.2 * GIB,
        hours=1.5,
        bounded=True,
    ),
    Report(
        source="eugr/spark-vllm-docker#43",
        says="GPU, 87 to 97 GB, then flat",
        first_bytes=87 * GB,
        last_bytes=97 * GB,
        hours=3,
        room_bytes=33 * GB,
        bounded=True,
        assumed="3 h; 120 GB in all",
    ),
)


def observations(report: Report) -> Iterator[Observation]:
    """Yield the growth, and some hours without growth where the report saw its end."""
    hours = report.hours + (FLAT_HOURS if report.bounded else 0.0)
    for number in range(int(hours * HOUR / STEP)):
        seconds = number * STEP
        grown = (report.last_bytes - report.first_bytes) * min(1.0, seconds / (report.hours * HOUR))
        grown = segments(grown) if report.room_bytes is not None else grown // 4096 * 4096
        yield Observation(
            seconds=seconds,
            held_bytes=int(report.first_bytes + grown),
            finished_total=float(int(seconds * RATE)),
            run_id="1",
            room_bytes=None if report.room_bytes is None else max(0, int(report.room_bytes - grown)),
        )


@cache
def course(report: Report) -> Course:
    return follow(observations(report))


@pytest.mark.parametrize(
    "report", [report for report in REPORTS if not report.bounded], ids=lambda report: report.source
)
def test_a_reported_leak_is_a_warning_within_two_hours_and_an_alarm_within_half_a_day(report: Report) -> None:
    verdicts = course(report).verdicts

    first_index = verdicts.index(Certainty.LEAKING)

    first_warning = next(number for number, verdict in enumerate(verdicts) if verdict)
    assert first_warning * STEP <= 2 * HOUR
    assert first_index * STEP <= 12 * HOUR
    assert set(verdicts[first_index:]) == {Certainty.LEAKING}


@pytest.mark.parametrize("report", [report for report in REPORTS if report.bounded], ids=lambda report: report.source)
def test_a_reported_growth_that_ended_is_no_leak_an_hour_later(report: Report) -> None:
    quiet_from = int((report.hours + 1) * HOUR / STEP)

    assert set(course(report).verdicts[quiet_from:]) == {Certainty.NONE}


def test_the_table_in_the_docs_is_what_the_detector_says(golden: Golden) -> None:
    page = ROOT / "docs" / "leaks.md"

    golden(page, between(page.read_text(encoding="utf-8"), "reports", table()))


def table() -> str:
    rows = (
        f"| {report.source} | {says(report)} | {pace(report)} | {after(report, Certainty.GROWING)} |"
        f" {after(report, Certainty.LEAKING)} | {end(report)} |"
        for report in REPORTS
    )
    return "\n".join(
        (
            "| report | says | pace | `growing` after | `leaking` after | alarm ends |",
            "| --- | --- | --- | --- | --- | --- |",
            *rows,
        )
    )


def says(report: Report) -> str:
    return report.says + (f" (assumed: {report.assumed})" if report.assumed else "")


def pace(report: Report) -> str:
    return f"{(report.last_bytes - report.first_bytes) / report.hours / HOUR / 1e3:,.0f} kB/s"


def after(report: Report, verdict: Certainty) -> str:
    """Return minutes and bytes until a verdict was reached."""
    hours = course(report).first(verdict)
    if hours is None:
        return "never"
    grown = (report.last_bytes - report.first_bytes) * min(1.0, hours / report.hours)
    return f"{hours * 60:.0f} min, {grown / 1e6:,.0f} MB"


def end(report: Report) -> str:
    verdicts = course(report).verdicts
    if not report.bounded:
        return "held" if verdicts[-1] is Certainty.LEAKING else "not held"
    last_raised = max(number for number, verdict in enumerate(verdicts) if verdict is not Certainty.NONE)
    return f"{last_raised * STEP / MINUTE - report.hours * 60:.0f} min after the growth"
