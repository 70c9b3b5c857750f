"""torch's memory history in a real vLLM on the stand-in card: what it leaves, and what it costs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.card.bench import INSIDE, LOOK_SECONDS, Bench, wait_until_ended, wait_until_served, watch
from tests.card.card import FOLDER, MIB, Cards
from tests.card.test_ends import read_postmortem, request_prompt_logprobs, serve_on_small_card
from tests.card.test_probe_on_card import LEAKING_LINE, serve_for
from tests.command import read_data

pytestmark = pytest.mark.card


def read_with_torch(file: Path) -> str:
    """Return the statistics that torch's own memory_viz prints of a snapshot."""
    (script,) = FOLDER.glob("venv/lib/python3*/site-packages/torch/cuda/_memory_viz.py")
    plot = file.with_suffix(".html")
    subprocess.run([sys.executable, script, "trace_plot", file, "-o", plot], check=True)
    assert plot.stat().st_size > file.stat().st_size
    done = subprocess.run([sys.executable, script, "stats", file], capture_output=True, text=True, check=True)
    return done.stdout


def call_probe(bench: Bench, *words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "vllm_headroom", "probe", *words, "--json"]
    variables = os.environ | {"HEADROOM_PROBE_DIR": str(bench.place / "probe")}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    data: dict[str, Any] = read_data(done.stdout)
    return data


def test_an_engine_that_runs_out_leaves_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = tmp_path / "snapshots"
    snapshots.mkdir()
    monkeypatch.setenv("HEADROOM_PROBE_SNAPSHOT", str(snapshots))
    with serve_on_small_card(tmp_path) as bench:
        wait_until_served(bench).complete()
        bench.daemon.sees(lambda page: page.has("allocator_ooms_total"), "the probe is read", LOOK_SECONDS, 1)
        bench.order("tensors", 64 * MIB)
        (snapshot,) = call_probe(bench, "snapshot")["snapshots"]
        bench.order("free")
        request_prompt_logprobs(bench)
        wait_until_ended(bench)
        postmortem = read_postmortem(bench)

    lines = (INSIDE / "card_orders.py").read_text().splitlines()
    number = next(number for number, text in enumerate(lines, 1) if text.strip().startswith(LEAKING_LINE))
    kept_lines = [line for line in snapshot["largest"] if line["file"].endswith("card_orders.py")]
    assert [(line["line"], line["bytes"], line["count"]) for line in kept_lines] == [(number, 64 * MIB, 64)]
    assert kept_lines[0]["since"] is not None

    (requested,) = snapshots.glob("requested-rank0-*.pickle")
    (oom,) = snapshots.glob("oom-rank0-*.pickle")
    assert snapshot["file"] == str(requested)
    (named,) = postmortem["known"]["snapshots"]
    assert named["file"] == str(oom)
    again = call_probe(bench, "snapshot", str(oom))
    assert [(line["bytes"], line["line"]) for line in again["largest"]] == [
        (line["bytes"], line["line"]) for line in named["largest"]
    ]
    for file in (requested, oom):
        assert re.search(r"total_reserved: [1-9]", read_with_torch(file))
    sys.stdout.write(f"{oom.stat().st_size} bytes, paused {snapshot['pause_seconds']} s\n")
    sys.stdout.write(f"{json.dumps(named['largest'], indent=1)}\n")


@pytest.mark.parametrize("is_on", [False, True])
def test_what_the_history_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_on: bool) -> None:  # noqa: FBT001
    """Requests a second and CPU a request; vLLM is bound by its CPU here, since no kernel runs: an upper bound."""
    (tmp_path / "snapshots").mkdir()
    if is_on:
        monkeypatch.setenv("HEADROOM_PROBE_SNAPSHOT", str(tmp_path / "snapshots"))
    options = ("--enforce-eager", "--max-model-len", "2048")
    with watch(tmp_path, *options, cards=Cards(folder=tmp_path / "cards")) as bench:
        wait_until_served(bench).complete(64)
        core = bench.read_reports()["EngineCore"]["pid"]
        costs: list[float] = []
        for _ in range(5):
            cpu_before, began = read_cpu_seconds(core), time.monotonic()
            rate = serve_for(bench, 10)
            tokens = 16 * rate * (time.monotonic() - began)
            costs.append(1000 * (read_cpu_seconds(core) - cpu_before) / tokens)
    sys.stdout.write(f"history {is_on}: CPU of the core, ms a step: {[round(cost, 3) for cost in costs]}\n")
    assert min(costs) > 0


def read_cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
