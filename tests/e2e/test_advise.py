"""The real daemon over the demo's scenarios, and what is advised of its page and of its trace."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.command import read_data
from tests.process import Page, daemon, eventually

SPEED = "1000"
HOUR = 3600.0


def advise(*words: str) -> tuple[int, dict[str, Any]]:
    process = subprocess.run(
        [sys.executable, "-m", "vllm_headroom", "advise", "--json", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert process.stderr == ""
    data = read_data(process.stdout)
    assert isinstance(data, dict)
    return process.returncode, data


def causes(document: dict[str, Any]) -> list[str]:
    return [advice["cause"] for advice in document["advice"]]


def is_in(page: Page, state: str) -> bool:
    return page.value("leak_state", state=state) == 1


def recorded_hours(file: Path) -> float:
    lines = file.read_text().splitlines() if file.exists() else []
    times = [json.loads(line)["t"] for line in (lines[1:2] + lines[-1:]) if '"t"' in line and line.endswith("}")]
    return (times[-1] - times[0]) / HOUR if times else 0.0


@pytest.mark.parametrize("scenario", ["healthy", "burst"])
def test_a_healthy_demo_is_advised_nothing_on_its_page_and_on_its_trace(scenario: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    with daemon("demo", "--scenario", scenario, "--speed", SPEED, TRACE_FILE=str(file)) as running:
        eventually(lambda: recorded_hours(file) > 1.5, "an hour and a half is recorded", 300)
        running.sees(lambda page: is_in(page, "stable") or is_in(page, "unsettled"), "the detector is warm", 300)
        of_page = advise("--headroom-url", running.url)
    of_trace = advise(str(file))

    assert (of_page[0], causes(of_page[1])) == (0, [])
    assert (of_trace[0], causes(of_trace[1])) == (0, [])


def test_a_leaking_demo_is_advised_a_restart_and_no_option(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    with daemon("demo", "--scenario", "leak", "--speed", SPEED, TRACE_FILE=str(file)) as running:
        running.sees(lambda page: is_in(page, "leaking"), "the leak is found", 300)
        of_page = advise("--headroom-url", running.url)
    of_trace = advise(str(file))

    for status, advice in (of_page, of_trace):
        assert (status, causes(advice)) == (1, ["gpu_leak"])
        assert [change["flag"] for change in advice["advice"][0]["changes"]] == [None, None]
