"""The leak benchmark, copied out of the repository: it needs nothing but its own folder and numpy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import oncall
import pytest
import tune

FOLDER: Final = Path(__file__).parents[1] / "bench" / "leak"
TINY: Final = ("--generator", "curves", "--hours", "6", "--interval", "60", "--jobs", "1", "--seeds", "1")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy without the recorded days; what the benchmark must not import fails there."""
    folder = tmp_path_factory.mktemp("alone")
    shutil.copytree(FOLDER, folder / "leak", ignore=shutil.ignore_patterns("recorded", "__pycache__"))
    (folder / "barred").mkdir()
    for name in ("vllm_headroom", "vllm_headroom_tools", "tests", "msgspec", "scipy"):
        (folder / "barred" / f"{name}.py").write_text("raise ImportError(__name__)\n")
    return folder / "leak"


def score(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "score.py", *TINY, *arguments],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy.parent / "barred")},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_a_copy_scores_a_program(copy: Path) -> None:
    leaks = ("--scenario", "leak_time_500000", "flat", "--json")

    done = score(copy, *leaks, "--", sys.executable, "simple.py", "challenger", "{}")

    assert (done.returncode, done.stderr) == (0, "")
    scored = json.loads(done.stdout)
    curves = scored["sets"]["curves"]
    assert curves["leaks"] == curves["critical"]["found"] == 1
    assert curves["critical"]["false"]["events"] == 0
    assert curves["page"]["found"] == 0, "a rule without a time left pages nobody"
    assert [row["scenario"] for row in scored["traces"]] == ["flat", "leak_time_500000"]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("print('[]')", "it printed no object with a list `gpus`"),
        ("raise SystemExit('no such option')", "printed no JSON: no such option"),
    ],
)
def test_a_program_that_cannot_be_scored_is_named_in_one_line(copy: Path, program: str, message: str) -> None:
    done = score(copy, "--scenario", "flat", "--", sys.executable, "-c", program)

    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("score.py: curves flat, seed 1: ")
    assert message in done.stderr


def report(leaking: list[list[float | None]], last_leaking: tuple[float, float] | None = None) -> oncall.Report:
    entry: dict[str, Any] = {"gpu": 0, "leaking_intervals": leaking}
    if last_leaking is not None:
        entry["last_leaking"] = {"t": last_leaking[0], "time_to_oom_seconds": last_leaking[1]}
    return oncall.read_report({"data": {"gpus": [entry]}}, "gpu")


def test_the_page_begins_where_less_than_an_hour_is_left() -> None:
    times = [60.0 * number for number in range(400)]
    asked_numbers = []

    def report_until(number: int) -> oncall.Report:
        asked_numbers.append(number)
        return report([[6000.0, None]], (times[number], 24_000.0 - times[number]))

    pages = oncall.find_pages(report([[6000.0, None]]), times, report_until)

    assert pages == [(20_460.0, float("inf"))], "the first sample with less than an hour"
    assert len(asked_numbers) <= 10


TRUTH: Final = {
    "scenario": "leak",
    "seed": 1,
    "group": "curves",
    "series": "gpu",
    "leak": True,
    "ambiguous": False,
    "started": 0.0,
    "onset": 10_000.0,
    "ends": 50_000.0,
    "oom_at": 50_000.0,
    "t": [0.0, 10_000.0, 30_000.0],
    "leaked_bytes": [0, 0, 2_000_000],
}


def test_what_begins_before_the_leak_is_false_and_what_comes_back_notifies_again() -> None:
    printed_report = report([[5000.0, 6000.0], [30_000.0, 31_000.0], [32_000.0, 33_000.0], [40_000.0, None]])

    row = oncall.score_report(
        printed_report, [(48_000.0, float("inf"))], {"t": 48_000.0, "time_to_oom_seconds": 1000.0}, TRUTH
    )

    assert row["false"] == {"warning": 1, "critical": 1, "page": 0}
    assert row["levels"]["critical"] == {
        "minutes": 20_000 / 60,
        "leaked_mb": 2.0,
        "lead_minutes": 20_000 / 60,
        "lasts": True,
    }
    assert row["levels"]["page"]["time_left_ratio"] == 0.5
    assert row["notifications"] == 2


def test_host_memory_without_a_last_time_left_is_not_judged_by_pages() -> None:
    host = TRUTH | {"series": "engine_core"}

    assert not oncall.score_report(report([[30_000.0, None]]), [], None, host)["page_known"]
    assert oncall.score_report(report([[30_000.0, None]], (48_000.0, 1000.0)), [], None, host)["page_known"]


def test_an_alarm_that_ends_long_before_the_end_does_not_last() -> None:
    row = oncall.score_report(report([[30_000.0, 40_000.0]]), [], None, TRUTH)

    assert not row["levels"]["critical"]["lasts"]
    assert "page" not in row["levels"]


@pytest.mark.parametrize(
    ("events", "lower", "upper"),
    [(0, 0.0, 3.688879), (1, 0.025318, 5.571643), (23, 14.580027, 34.511293), (700, 649.097780, 753.833362)],
)
def test_the_interval_of_a_rate_is_exact(events: int, lower: float, upper: float) -> None:
    assert oncall.bound_rate(events, oncall.YEAR_DAYS) == pytest.approx((events, lower, upper), abs=1e-6)


def test_a_simple_rule_is_tuned_to_find_leaks_without_false_alarms() -> None:
    """A cache of a third of the card fills and stays; the leak takes all of it."""
    full = 80e9
    times = range(0, 6 * 3600, 60)
    cache = [(float(at), 50e9 + min(at * 2e6, 25e9), full) for at in times]
    leak = [(float(at), min(50e9 + at * 2e6, full), full) for at in times]
    cases = [tune.Case(cache, is_leak=False, onset=0.0), tune.Case(leak, is_leak=True, onset=0.0)]

    settings, (score, found_count, false) = tune.choose("threshold", cases)

    assert settings == {"share": 0.97, "lasting": 600.0}
    assert (score, found_count, false) == (1.0, 1, 0)
