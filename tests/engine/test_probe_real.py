"""The probe inside a real vLLM: in every process, with figures that vLLM's log has too, and never in its way."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.command import read_data
from tests.engine.probed import Document, Probed, probed
from tests.engine.serving import FOLDER
from tests.process import eventually
from tests.unit.probe.running import SPOILING

pytestmark = pytest.mark.engine

HERE: Final = Path(__file__).parent
LEAKING: Final = HERE / "leaking"
LINE: Final = 1 + (LEAKING / "vllm_leaking.py").read_text().splitlines().index("        kept.append(bytearray(12_800))")
COST_RATIO: Final = 0.001


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probed]:
    with probed(tmp_path_factory.mktemp("probed"), path=(LEAKING,)) as running:
        yield running


def parts(engine: Probed, worker: str) -> Document:
    """Wait for what a worker's memory is used for, the KV cache too, which it makes after its weights."""

    def known() -> Document | None:
        document: Document = engine.reports()[worker]["parts"] or {}
        return document if document.get("kv_cache") else None

    return eventually(known, "the worker has a model and a KV cache")


def test_every_process_has_loaded_it(engine: Probed) -> None:
    reports = eventually(lambda: all_ if len(all_ := engine.reports()) >= 3 else None, "three processes report")

    assert {name: report["role"] for name, report in reports.items()} == {
        "MainProcess": "api_server",
        "EngineCore": "engine_core",
        "VllmWorker-0": "worker",
    }
    assert {(value["vllm"], value["torch"]) for value in reports.values()} == {("0.32.0", "2.13.0+cpu")}
    assert engine.said() == []


def test_the_figures_are_those_of_vllms_log(engine: Probed) -> None:
    log = engine.log.read_text(errors="replace")
    tokens = int(re.findall(r"KV cache size: ([\d,]+) tokens", log)[0].replace(",", ""))
    gib = float(re.findall(r"Explicitly set \(([\d.]+)/", log)[0])
    core = eventually(lambda: engine.reports()["EngineCore"]["scheduler"], "the core has a scheduler")
    worker = parts(engine, "VllmWorker-0")

    assert core["kv_blocks_total"] * core["block_size"] == tokens
    assert worker["kv_cache"] == gib * 2**30 == tokens * core["bytes_per_kv_token"]
    assert (core["max_num_seqs"], core["max_model_len"]) == (16, 2048)
    assert worker["weights"] > 500_000, "the tiny model's parameters and buffers"


def test_steps_and_blocks_follow_the_work(engine: Probed) -> None:
    report_before = engine.reports()["EngineCore"]
    engine.complete("w300 w301", 20)
    report_after = engine.after("EngineCore", report_before["sequence"] + 1)

    assert report_after["scheduler"]["steps_total"] >= report_before["scheduler"]["steps_total"] + 20
    assert 0 < report_after["scheduler"]["kv_blocks_free"] <= report_after["scheduler"]["kv_blocks_total"]


def test_tokens_fill_the_blocks_of_a_request_but_its_last(engine: Probed) -> None:
    asking = threading.Thread(target=engine.complete, args=("w300 w301", 1900))
    asking.start()

    def holding() -> Document | None:
        document: Document | None = engine.reports()["EngineCore"]["scheduler"]
        return document if document and document["kv_blocks_live"] else None

    core = eventually(holding, "a request holds blocks")
    asking.join()

    sys.stdout.write(f"{core['kv_tokens_live']} tokens in {core['kv_blocks_live']} blocks of {core['block_size']}\n")
    assert core["kv_blocks_live"] - 1 <= core["kv_tokens_live"] / core["block_size"] <= core["kv_blocks_live"]


def test_it_costs_little(engine: Probed) -> None:
    first_reports = engine.reports()
    later = {name: engine.after(name, first_report["sequence"] + 5) for name, first_report in first_reports.items()}

    for name, report in later.items():
        seconds = report["t"] - first_reports[name]["t"]
        used = report["cost"]["cpu_seconds"] - first_reports[name]["cost"]["cpu_seconds"]
        sys.stdout.write(
            f"{name}: {used / seconds:.5%} of a core, the longest look {report['cost']['longest_seconds']} s\n"
        )
        assert used / seconds <= COST_RATIO


def test_a_recording_names_the_line_that_leaks(engine: Probed) -> None:
    recording_process = subprocess.Popen(
        [sys.executable, "-m", "vllm_headroom", "probe", "record", "--for", "60s", "--json"],
        env=os.environ | {"HEADROOM_PROBE_DIR": str(engine.folder)},
        stdout=subprocess.PIPE,
        text=True,
    )
    sequence_before = engine.reports()["EngineCore"]["sequence"]
    engine.after("EngineCore", sequence_before + 1)  # which has seen the request by then
    for _ in range(200):
        engine.complete("w300 w301", 1)
    out, _ = recording_process.communicate(timeout=300)

    processes = {process["role"]: process for process in read_data(out)["processes"]}
    sys.stdout.write(
        json.dumps(
            {
                role: [recorded_process["cost"], recorded_process["host"][:2]]
                for role, recorded_process in processes.items()
            }
        )
        + "\n"
    )
    worst = processes["engine_core"]["host"][0]
    assert worst["stack"][0] == f"{LEAKING / 'vllm_leaking.py'}:{LINE}"
    assert worst["bytes"] >= worst["count"] // 2 * 12_800 > 0, "each an object and its memory"


def test_a_stopped_worker_falls_silent_and_the_others_go_on(engine: Probed) -> None:
    worker = engine.reports()["VllmWorker-0"]
    os.kill(worker["pid"], signal.SIGSTOP)
    try:
        stopped = engine.reports()["VllmWorker-0"]["sequence"]
        engine.after("EngineCore", engine.reports()["EngineCore"]["sequence"] + 1)
        assert engine.reports()["VllmWorker-0"]["sequence"] <= stopped + 1
    finally:
        os.kill(worker["pid"], signal.SIGCONT)
    assert engine.serves()


def test_without_its_folder_it_stops_and_vllm_serves(engine: Probed) -> None:
    shutil.rmtree(engine.folder)
    message = eventually(lambda: lines if len(lines := engine.said()) >= 3 else None, "each process says so once")

    assert all("stopped for good" in line and "No such file or directory" in line for line in message)
    assert engine.serves()


def test_a_probe_that_raises_everywhere(tmp_path: Path) -> None:
    with probed(tmp_path, path=(SPOILING,)) as engine:
        assert engine.serves()
        assert engine.said()
        assert list(engine.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "why"), [("size=4k", "No space left on device"), ("size=64k,ro", "Read-only file system")]
)
def test_a_folder_that_takes_no_more(tmp_path: Path, options: str, why: str) -> None:
    mount = f'mount -t tmpfs -o {options} probe {tmp_path / "files"} && exec "$@"'
    with probed(tmp_path, command_prefix=("unshare", "-rm", "sh", "-c", mount, "sh")) as engine:
        message = eventually(lambda: lines if len(lines := engine.said()) >= 2 else None, "they say so")
        assert all(why in line for line in message)
        assert engine.serves()


def test_with_two_data_parallel_engines_and_a_kill(tmp_path: Path) -> None:
    with probed(tmp_path, "--data-parallel-size", "2", VLLM_CPU_OMP_THREADS_BIND="0|1") as engine:
        expected = {"EngineCore_DP0", "EngineCore_DP1", "VllmWorker-0"}
        reports = eventually(lambda: all_ if expected <= set(all_ := engine.reports()) else None, "all report")
        ranks = {
            name: report["data_parallel_rank"] for name, report in reports.items() if name.startswith("EngineCore")
        }
        assert ranks == {"EngineCore_DP0": 0, "EngineCore_DP1": 1}
        assert engine.serves()
        eventually(lambda: engine.reports()["EngineCore_DP0"]["scheduler"], "the core has a scheduler")

        os.killpg(engine.process.pid, signal.SIGKILL)
        engine.process.wait(60)
        assert engine.reports()["EngineCore_DP0"]["scheduler"]["max_num_seqs"] == 16


def test_with_two_ranks_of_one_engine(tmp_path: Path) -> None:
    with probed(tmp_path, "--tensor-parallel-size", "2", VLLM_CPU_OMP_THREADS_BIND="0|1") as engine:
        expected = {"EngineCore", "VllmWorker-0", "VllmWorker-1"}
        reports = eventually(lambda: all_ if expected <= set(all_ := engine.reports()) else None, "all report")
        workers = [reports["VllmWorker-0"], reports["VllmWorker-1"]]
        core = eventually(lambda: engine.reports()["EngineCore"]["scheduler"], "the core has a scheduler")

        assert [(worker["rank"], worker["local_rank"], worker["role"]) for worker in workers] == [
            (0, 0, "worker"),
            (1, 1, "worker"),
        ]
        tokens = core["kv_blocks_total"] * core["block_size"]
        kv_cache = sum(parts(engine, f"VllmWorker-{rank}")["kv_cache"] for rank in (0, 1))
        assert kv_cache == tokens * core["bytes_per_kv_token"]
        assert engine.serves()


def test_in_an_older_vllm(tmp_path: Path) -> None:
    """Of 0.27 all is known that is of 0.32."""
    with probed(tmp_path, path=(FOLDER / "older",)) as engine:
        reports = eventually(lambda: all_ if len(all_ := engine.reports()) >= 3 else None, "three processes report")
        assert {value["vllm"] for value in reports.values()} == {"0.27.1"}

        core = eventually(lambda: engine.reports()["EngineCore"]["scheduler"], "the core has a scheduler")
        worker = parts(engine, "VllmWorker-0")
        assert (core["max_num_seqs"], core["max_model_len"]) == (16, 2048)
        tokens = core["kv_blocks_total"] * core["block_size"]
        assert worker["kv_cache"] == tokens * core["bytes_per_kv_token"]
        assert worker["weights"] > 500_000
        assert engine.said() == []
        assert engine.serves()
        report_after = engine.after("EngineCore", engine.reports()["EngineCore"]["sequence"])
        assert report_after["scheduler"]["steps_total"] >= core["steps_total"] + 2
