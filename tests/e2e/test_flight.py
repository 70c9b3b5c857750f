"""The real daemon beside processes that look like vLLM's: what is left on disk when one of them is killed."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tests.command import read_data
from tests.e2e.life import Start, becomes, last_look, settings
from tests.fakes.nvml.library import FakeNvml
from tests.process import daemon, eventually
from vllm_headroom.trace.flight import list_incidents
from vllm_headroom_tools.trace import read_trace


def last_recorded(state: Path) -> float:
    record = state / "flight.jsonl"
    return [snapshot.time_seconds for snapshot in read_trace(str(record))][-1] if record.exists() else 0.0


def test_a_killed_core_leaves_an_incident_and_postmortem_says_what_it_was(
    start: Start, nvml: FakeNvml, port: int, tmp_path: Path
) -> None:
    state, vllm = tmp_path / "state", start()
    with daemon(**settings(port, nvml, STATE_DIR=str(state))) as running:
        becomes(running, "serving")
        assert running.get("/snapshot.json").json()["last_incident"] is None
        vllm.kill(vllm.core)
        last_incident = eventually(lambda: running.get("/snapshot.json").json()["last_incident"], "an incident is told")

        assert last_incident["command"] == f"vllm-headroom postmortem {last_incident['file']}"
        assert last_incident["file"] in running.get("/").text
        running.sees(
            lambda page: page.value("last_incident_timestamp_seconds") == last_incident["t"], "the page says when"
        )
        process = subprocess.run(
            [sys.executable, "-m", "vllm_headroom", "postmortem", str(state), "--json"],
            capture_output=True,
            text=True,
            check=True,
        )
        data = read_data(process.stdout)
        assert data["cause"] == "crash"
        assert data["sure"] != "sure"
        assert data["file"] == last_incident["file"]
        assert any("engine is serving" in line for line in data["known"]["log"])
        assert "an incident was set aside" in running.log()


def test_a_daemon_that_is_killed_loses_one_interval_at_most_and_goes_on_in_its_record(
    start: Start, nvml: FakeNvml, port: int, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    start()
    with daemon(**settings(port, nvml, STATE_DIR=str(state))) as running:
        expected_seconds = last_look(becomes(running, "serving")) - 5.0 - 1.0  # an interval, and the time of a look
        eventually(lambda: last_recorded(state) >= expected_seconds, "what was seen is on the disk")
        running.stop(signal.SIGKILL)
    assert last_recorded(state) >= expected_seconds

    record_count = sum(1 for _ in read_trace(str(state / "flight.jsonl")))
    with daemon(**settings(port, nvml, STATE_DIR=str(state))) as running:
        becomes(running, "serving")
        eventually(lambda: sum(1 for _ in read_trace(str(state / "flight.jsonl"))) > record_count, "the record goes on")
    assert list_incidents(state / "incidents") == []


def test_a_state_directory_that_vanishes_costs_no_sample(
    start: Start, nvml: FakeNvml, port: int, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    start()
    with daemon(**settings(port, nvml, STATE_DIR=str(state))) as running:
        becomes(running, "serving")
        shutil.rmtree(state)
        state.write_text("in its place")
        eventually(lambda: "flight record not written" in running.log(), "it is told")
        looked_before = last_look(running.page())
        running.sees(lambda page: last_look(page) > looked_before + 10, "the samples go on")

        state.unlink()
        eventually(lambda: "flight record written again" in running.log(), "it is written again")
        assert running.stop()[0] == 0
