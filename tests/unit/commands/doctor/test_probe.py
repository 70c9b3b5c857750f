"""Is the probe there, loaded, and does it answer?"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.commands.doctor.looking import Vllm, examined, lines, proc
from vllm_headroom.scrape.proc import files as proc_files
from vllm_headroom.scrape.proc.host import read_boot_time
from vllm_headroom_tools.doctor.engine import FROM_PROBE, NO_GPU, NO_HISTORY, NO_PEAKS, NO_PROBE_DIR
from vllm_headroom_tools.doctor.fixes import Check, Status

NOW = time.time()


def write(folder: Path, pid: int, role: str, **changes: Any) -> None:
    """Write a process's file as its probe does."""
    report: dict[str, Any] = {
        "headroom_probe": 1,
        "t": time.time(),
        "interval_seconds": 5.0,
        "pid": pid,
        "started_at": NOW - 100,
        "role": role,
        "vllm": "0.32.0",
    } | changes
    (folder / f"{pid}-{int(report['started_at'])}.json").write_text(json.dumps(report))


def check_probe_folder(folder: Path, proc: Path | None = None, **settings: str) -> Check:
    return examined(proc, PROBE_DIR=str(folder), **settings)["probe"]


def test_without_its_folder_it_does_not_apply() -> None:
    finding = examined()["probe"]

    assert (finding.state, finding.text) == (Status.NOT_APPLICABLE, NO_PROBE_DIR)


def test_it_is_there_and_answers(tmp_path: Path) -> None:
    write(tmp_path, 7, "engine_core")
    write(tmp_path, 8, "worker", devices=[{"uuid": "GPU-a", "allocated": 1}])
    write(tmp_path, 9, "worker")

    finding = check_probe_folder(tmp_path)

    assert (finding.state, finding.text) == (Status.OK, "it answers in 1 engine_core, 2 worker of vLLM 0.32.0")
    assert (finding.details, finding.absent, finding.fixes) == ((NO_PEAKS, NO_HISTORY), (), ())


def test_it_says_what_the_probe_measures_on_request(tmp_path: Path) -> None:
    peaks: dict[str, Any] = {"kinds": {}, "stopped": None}
    snapshot = {"history_from": NOW - 90}
    write(tmp_path, 8, "worker", devices=[{"uuid": "GPU-a", "allocated": 1}], peaks=peaks, snapshot=snapshot)

    assert check_probe_folder(tmp_path).details == (
        "peaks of its steps: measured",
        "history of torch's allocations: kept, for snapshots",
    )


def test_it_says_why_peaks_are_no_longer_measured(tmp_path: Path) -> None:
    peaks: dict[str, Any] = {"kinds": {}, "stopped": "AttributeError: no num_tokens"}
    write(tmp_path, 8, "worker", devices=[{"uuid": "GPU-a", "allocated": 1}], peaks=peaks)

    assert check_probe_folder(tmp_path).details[0] == (
        "worker (pid 8 of its container) no longer measures the peaks of its steps: AttributeError: no num_tokens"
    )


def test_without_figures_of_torch_it_says_so(tmp_path: Path) -> None:
    write(tmp_path, 7, "engine_core")

    assert check_probe_folder(tmp_path).details == (NO_GPU,)


def test_a_folder_in_which_nobody_has_written_is_missing_the_probe(tmp_path: Path) -> None:
    finding = check_probe_folder(tmp_path)

    assert finding.state is Status.MISSING
    assert finding.text.startswith(f"no probe has written into {tmp_path}")
    assert finding.absent == FROM_PROBE
    assert "  - {name: PYTHONPATH, value: /opt/headroom-probe}" in lines(finding)


def test_a_folder_that_is_not_there_is_missing(tmp_path: Path) -> None:
    finding = check_probe_folder(tmp_path / "nowhere")

    assert finding.state is Status.MISSING
    assert "cannot be read (No such file or directory)" in finding.text


def test_what_wrote_long_ago_is_no_answer(tmp_path: Path) -> None:
    write(tmp_path, 7, "engine_core", t=NOW - 3600)

    finding = check_probe_folder(tmp_path)

    assert finding.state is Status.MISSING
    assert finding.text.startswith("none of vLLM's processes writes now")


@pytest.mark.parametrize("has_others", [True, False])
def test_a_probe_that_has_stopped_says_why(tmp_path: Path, *, has_others: bool) -> None:
    write(tmp_path, 7, "worker", stopped="/run/headroom-probe: No space left on device")
    if has_others:
        write(tmp_path, 8, "engine_core")

    finding = check_probe_folder(tmp_path)

    assert finding.state is Status.MISSING
    assert finding.details == (
        "worker (pid 7 of its container) has stopped: /run/headroom-probe: No space left on device",
    )
    assert finding.text.startswith("it answers in 1 engine_core" if has_others else "none of vLLM's processes writes")


def test_a_process_that_runs_and_writes_no_longer_is_reported(tmp_path: Path, vllm: Vllm) -> None:
    (tmp_path / "files").mkdir()
    tree = proc(tmp_path, vllm)
    entry = proc_files.read_entry(tree, 4426)
    assert entry is not None
    began = read_boot_time(tree) + entry.started_seconds
    write(tmp_path / "files", 7, "engine_core", t=NOW - 3600, started_at=began)

    finding = check_probe_folder(tmp_path / "files", tree, ENGINE_URL=vllm.url)

    assert finding.state is Status.MISSING
    assert finding.text == "vLLM's processes have loaded it, and none writes any more: they are stopped or stuck"
