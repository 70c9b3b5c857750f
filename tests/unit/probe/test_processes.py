"""The probe in every process of a vLLM, by spawn and by fork, alive, stopped and killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest

from tests.process import eventually
from tests.unit.probe.running import INSIDE, environment, vllm
from vllm_headroom.parse.probe import parse_probe
from vllm_headroom.scrape.proc import files as proc
from vllm_headroom.scrape.proc.host import read_boot_time
from vllm_headroom.vocabulary import Role
from vllm_headroom_tools.probe.install import install

STARTS: Final = pytest.mark.parametrize("start", ["spawn", "fork"])


@STARTS
def test_every_process_reports_what_it_alone_knows(site: Path, folder: Path, start: str) -> None:
    with vllm(site, folder, "--start", start, "--workers", "2") as running:
        reports = running.reports_of("EngineCore", "VllmWorker-0", "VllmWorker-1")

        assert {name: report["role"] for name, report in reports.items()} == {
            "EngineCore": "engine_core",
            "VllmWorker-0": "worker",
            "VllmWorker-1": "worker",
        }
        assert reports["VllmWorker-1"]["parts"] == {
            "weights": 525_568,
            "kv_cache": 1 << 30,
            "cuda_graphs": None,
            "cuda_graphs_estimate": None,
            "activation_peak": None,
            "requested": None,
        }
        assert [reports[name]["rank"] for name in sorted(reports)] == [None, 0, 1]
        scheduler = reports["EngineCore"]["scheduler"]
        assert scheduler.pop("steps_total") > 0
        assert scheduler == {
            "kv_blocks_total": 16_384,
            "kv_blocks_free": 16_375,
            "kv_blocks_live": 3,
            "kv_tokens_live": 300,
            "block_size": 128,
            "running": 3,
            "waiting": 2,
            "max_num_seqs": 16,
            "max_model_len": 2048,
            "bytes_per_kv_token": 512,
        }
        eventually(
            lambda: [report for report in running.reports() if report["role"] == "api_server"], "the API server reports"
        )


@STARTS
def test_with_data_parallel_engines_and_workers_inside_them(site: Path, folder: Path, start: str) -> None:
    with vllm(site, folder, "--start", start, "--cores", "2", "--workers", "0") as running:
        reports = running.reports_of("EngineCore_DP0", "EngineCore_DP1")

        assert [reports[name]["data_parallel_rank"] for name in sorted(reports)] == [0, 1]
        assert all(
            value["role"] == "engine_core" and value["parts"]["kv_cache"] == 1 << 30 for value in reports.values()
        )


def test_a_report_names_its_process_as_the_sidecar_finds_it(site: Path, folder: Path) -> None:
    with vllm(site, folder) as running:
        core = running.reports_of("EngineCore")["EngineCore"]

        entry = proc.read_entry(Path("/proc"), core["pid"])
        assert entry is not None
        assert core["started_at"] == pytest.approx(read_boot_time(Path("/proc")) + entry.started_seconds)
        assert core["started_since_boot"] == entry.started_seconds
        assert core["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        assert (folder / f"{core['pid']}-{int(core['started_at'])}.json").exists()
        assert abs(core["t"] - time.time()) < 60
        assert (core["headroom_probe"], core["vllm"], core["torch"]) == (1, "0.32.0", None)


def test_the_daemon_understands_every_file(site: Path, folder: Path) -> None:
    with vllm(site, folder) as running:
        running.reports_of("EngineCore", "VllmWorker-0")
        parsed = [parse_probe(path.read_bytes()) for path in folder.glob("*-*.json")]

        assert [parsed_report for parsed_report in parsed if isinstance(parsed_report, str)] == []
        understood = {
            parsed_report[0].role: parsed_report[0] for parsed_report in parsed if not isinstance(parsed_report, str)
        }
        worker, core = understood[Role.WORKER].parts, understood[Role.ENGINE_CORE].scheduler
        assert worker is not None
        assert worker.kv_cache_bytes == 1 << 30
        assert core is not None
        assert core.max_num_seqs == 16
        assert core.kv_stranded_ratio == pytest.approx(5 / 16_383)
        assert core.kv_token_ratio == pytest.approx(300 / (16_383 * 128))


def test_steps_go_on_and_a_stopped_core_says_so_by_its_age(site: Path, folder: Path) -> None:
    with vllm(site, folder) as running:
        first_report = running.reports_of("EngineCore")["EngineCore"]
        eventually(
            lambda: (
                running.reports_of("EngineCore")["EngineCore"]["scheduler"]["steps_total"]
                > first_report["scheduler"]["steps_total"]
            ),
            "the core takes steps",
        )
        os.kill(first_report["pid"], signal.SIGSTOP)
        eventually(lambda: _states(first_report["pid"]) == {"T"}, "all threads of the core are stopped")
        last_report = running.reports_of("EngineCore")["EngineCore"]
        worker = running.reports_of("VllmWorker-0")["VllmWorker-0"]
        eventually(
            lambda: running.reports_of("VllmWorker-0")["VllmWorker-0"]["sequence"] > worker["sequence"] + 2,
            "the worker reports on",
        )
        assert running.reports_of("EngineCore")["EngineCore"] == last_report

        os.kill(first_report["pid"], signal.SIGCONT)
        eventually(
            lambda: running.reports_of("EngineCore")["EngineCore"]["sequence"] > last_report["sequence"],
            "it reports again",
        )


def test_the_last_report_outlives_its_process(site: Path, folder: Path) -> None:
    with vllm(site, folder) as running:
        core = running.reports_of("EngineCore")["EngineCore"]
        os.kill(core["pid"], signal.SIGKILL)
        running.process.wait(30)

        assert running.reports_of("EngineCore")["EngineCore"]["scheduler"]["max_num_seqs"] == 16


def test_without_the_variable_nothing_is_written(site: Path, folder: Path) -> None:
    with vllm(site, folder, is_probed=False) as running:
        assert running.serves()
    assert list(folder.iterdir()) == []


def test_without_the_variable_nothing_of_it_is_loaded(site: Path) -> None:
    code = "import sys, vllm_headroom_probe; vllm_headroom_probe.register(); print(*sys.modules)"
    out = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(site), "HEADROOM_PROBE_DIR": ""},
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert {name for name in out.split() if name.startswith("vllm_headroom")} == {"vllm_headroom_probe"}


def test_of_two_installations_one_runs(site: Path, folder: Path, tmp_path: Path) -> None:
    install(tmp_path / "again")
    with vllm(site, folder, PYTHONPATH=f"{site}:{tmp_path / 'again'}:{INSIDE}") as running:
        names = [value["process_name"] for value in running.reports_of("EngineCore", "VllmWorker-0").values()]

        assert sorted(names) == ["EngineCore", "VllmWorker-0"]
        assert _threads(running.process.pid) == 2, "its main thread and the probe's"


def _threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def _states(pid: int) -> set[str]:
    return {stat.read_text().rpartition(") ")[2][0] for stat in Path(f"/proc/{pid}/task").glob("*/stat")}


RUN_A_CORE: Final = """
import glob, sys, time
from vllm.engine import EngineCore, config
core = EngineCore(config(0), 0, "spawn")
runner = core.model_executor.driver_worker.worker.model_runner
runner.execute_model = runner.sample_tokens = original = object()
while not glob.glob(f"{sys.argv[1]}/[0-9]*.json"):
    time.sleep(0.01)
assert runner.execute_model is original and runner.sample_tokens is original
print(*(name for name in sys.modules if name.startswith("vllm_headroom_probe.")))
"""


@pytest.mark.parametrize("setting", [{}, {"HEADROOM_PROBE_PEAKS": "off"}, {"HEADROOM_PROBE_PEAKS": "on"}])
def test_without_peaks_nothing_of_them_is_loaded(site: Path, folder: Path, setting: dict[str, str]) -> None:
    environ = environment(site, folder, **setting)
    command = [sys.executable, "-c", RUN_A_CORE, str(folder)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    (report,) = [json.loads(path.read_text()) for path in folder.glob("[0-9]*.json")]

    modules = {"vllm_headroom_probe.peaks", "vllm_headroom_probe.batch"}
    is_on = setting.get("HEADROOM_PROBE_PEAKS") == "on"
    assert modules & set(done.stdout.split()) == (modules if is_on else set())
    assert ("peaks" in report) == is_on
