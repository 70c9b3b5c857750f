"""The probe in a real vLLM on the stand-in card: each figure against torch's, vLLM's log and the ledger."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from tests.card.bench import INSIDE, LOOK_SECONDS, Bench, wait_until_served, watch
from tests.card.card import GIB, MIB, Cards
from tests.command import read_data
from tests.process import eventually
from tests.unit.probe.running import SPOILING

pytestmark = pytest.mark.card

LEAKING_LINE: Final = "kept.append(torch.empty(MIB"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    place = tmp_path_factory.mktemp("card")
    cards = Cards(folder=place / "cards", total_bytes=24 * GIB)
    options = ("--enforce-eager", "--max-model-len", "2048", "--gpu-memory-utilization", "0.7")
    with watch(place, *options, cards=cards, SAMPLE_INTERVAL_SECONDS="1") as running:
        wait_until_served(running).complete()
        yield running


def read_settled(bench: Bench) -> tuple[dict[str, float], dict[str, Any]]:
    """The parts on the daemon's page and torch's own figures, once the page has the newest of the probe."""

    def agree() -> tuple[dict[str, float], dict[str, Any]] | None:
        stats = bench.order("stats")
        page = bench.daemon.page()
        is_new = page.has("allocator_allocated_bytes") and page.value("allocator_allocated_bytes") == float(
            stats["allocated_bytes.all.current"]
        )
        return (bench.read_parts(), stats) if is_new and "outside_torch" in bench.read_parts() else None

    return eventually(agree, "the page has the probe's newest figures", LOOK_SECONDS, 1)


def test_the_parts_sum_to_what_the_card_holds(bench: Bench) -> None:
    parts, stats = read_settled(bench)
    held_bytes = sum(bench.cards.read_holders().values())

    assert sum(parts.values()) == held_bytes
    assert parts["outside_torch"] == held_bytes - stats["reserved_bytes.all.current"] == bench.cards.context_bytes
    assert parts["fragmented"] == stats["inactive_split_bytes.all.current"]
    assert parts["weights"] + parts["kv_cache"] + parts["other_tensors"] == stats["allocated_bytes.all.current"]
    tokens = int(bench.find_in_log(r"KV cache size: ([\d,]+) tokens").replace(",", ""))
    scheduler = bench.read_reports()["EngineCore"]["scheduler"]
    assert parts["kv_cache"] == tokens * scheduler["bytes_per_kv_token"]
    assert float(bench.find_in_log(r"Available KV cache memory: ([\d.]+) GiB")) == pytest.approx(
        parts["kv_cache"] / GIB, abs=0.01
    )


def test_each_process_and_the_daemon_name_one_card(bench: Bench) -> None:
    reports = eventually(lambda: all_ if len(all_ := bench.read_reports()) >= 2 else None, "both report", LOOK_SECONDS)

    assert {report["role"] for report in reports.values()} == {"api_server", "engine_core"}
    assert list(bench.cards.read_holders()) == [reports["EngineCore"]["pid"]], "the server makes no context"


def test_memory_past_torch_is_outside_and_holes_are_fragmented(bench: Bench) -> None:
    parts_before, _ = read_settled(bench)
    assert bench.order("outside", 512 * MIB) == {"error": 0}
    bench.order("fragments", 400 * MIB)

    def moved() -> dict[str, float] | None:
        parts, _ = read_settled(bench)
        return parts if parts["outside_torch"] > parts_before["outside_torch"] else None

    parts_after = eventually(moved, "the page has both", LOOK_SECONDS, 1)
    bench.order("free", 1)
    assert parts_after["outside_torch"] - parts_before["outside_torch"] == 512 * MIB
    assert parts_after["fragmented"] - parts_before["fragmented"] >= 200 * MIB


def test_retries_and_errors_are_counted_when_they_happen(bench: Bench) -> None:
    first_page = bench.daemon.page()
    retries, ooms = (first_page.value(f"allocator_{name}_total") for name in ("retries", "ooms"))
    answer = bench.order("fail", 100 * GIB)

    assert "CUDA out of memory. Tried to allocate 100.00 GiB" in answer["error"]
    later = bench.daemon.sees(lambda page: page.value("allocator_ooms_total") > ooms, "it is counted", LOOK_SECONDS, 1)
    assert later.value("allocator_ooms_total") == ooms + 1
    assert later.value("allocator_retries_total") == retries + 1
    assert bench.complete().status_code == 200


def test_a_recording_names_the_line_of_a_leaked_tensor(bench: Bench) -> None:
    with record(bench, "40s") as recording:
        bench.order("tensors", 64 * MIB)
        out, _ = recording.communicate(timeout=LOOK_SECONDS)
    bench.order("free")

    source = INSIDE / "card_orders.py"
    lines = source.read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.strip().startswith(LEAKING_LINE))
    core = next(process for process in read_data(out)["processes"] if process["role"] == "engine_core")
    sys.stdout.write(f"{core['cost']} {core['gpu'][0]}\n")
    assert core["gpu"][0]["stack"][0] == f"{source}:{line}"
    assert (core["gpu"][0]["bytes"], core["gpu"][0]["count"]) == (64 * MIB, 64)


def test_what_the_probe_and_a_recording_cost(bench: Bench) -> None:
    """Requests a second, in turns of 20 s; vLLM is bound by its CPU here, since no kernel runs: an upper bound."""
    rates: dict[str, list[float]] = {"idle": [], "host": [], "gpu": []}
    for _ in range(3):
        rates["idle"].append(serve_for(bench, 20))
        for kind in ("host", "gpu"):
            with record(bench, "30s", "--only", kind):
                rates[kind].append(serve_for(bench, 20))
    cost = bench.read_reports()["EngineCore"]["cost"]

    sys.stdout.write(f"requests a second: {rates}; the probe: {cost}\n")
    assert min(map(min, rates.values())) > 0


def serve_for(bench: Bench, seconds: float) -> float:
    began, served = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        served += bench.complete(16).status_code == 200
    return round(served / (time.monotonic() - began), 2)


@contextmanager
def record(bench: Bench, seconds: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Run `probe record` from when each process has begun to record."""
    command = [sys.executable, "-m", "vllm_headroom", "probe", "record", "--for", seconds, "--json", *options]
    variables = os.environ | {"HEADROOM_PROBE_DIR": str(bench.place / "probe")}
    recording = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)
    sequence_before = bench.read_reports()["EngineCore"]["sequence"]
    eventually(
        lambda: bench.read_reports()["EngineCore"]["sequence"] > sequence_before + 1, "it has begun", LOOK_SECONDS, 1
    )
    yield recording
    if recording.returncode is None:
        recording.communicate(timeout=LOOK_SECONDS)


def test_the_engine_serves_on_without_the_folder(bench: Bench) -> None:
    folder = bench.place / "probe"
    folder.rename(folder.with_name("gone"))
    eventually(lambda: "headroom probe: stopped for good" in bench.read_log(), "the probe says so", LOOK_SECONDS, 1)

    assert bench.complete().status_code == 200
    bench.daemon.sees(lambda page: not page.has("allocator_reserved_bytes"), "stale figures are gone", LOOK_SECONDS, 1)


def test_a_probe_that_raises_everywhere(tmp_path: Path) -> None:
    with watch(tmp_path, "--enforce-eager", "--max-model-len", "2048", modules=(SPOILING,)) as running:
        assert wait_until_served(running).complete().status_code == 200
        assert "headroom probe" in running.read_log()
        assert not list((tmp_path / "probe").iterdir())
