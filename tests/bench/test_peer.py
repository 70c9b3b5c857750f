"""What a second costs, beside a peer that reads no engine and the exporter that one writes in an afternoon."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack

import pytest

from tests.bench.busy_engine import EIGHT_ENGINES, ONE_ENGINE, busy
from tests.bench.conftest import quiet_nvml
from tests.bench.exporters import PEER, Exporter, environment, naive, ours, peer, runtime
from tests.bench.results import Results
from tests.fakes.engine_server import EngineServer
from tests.fakes.nvml.library import MIB

pytestmark = pytest.mark.bench

SECONDS = int(os.environ.get("BENCH_PEER_SECONDS", "60"))
SETTLE_SECONDS = 5
SITUATIONS = {
    "1 GPU, 1 engine": (1, ONE_ENGINE, 1.2),
    "8 GPUs, 1 engine": (8, ONE_ENGINE, 0.9),
    "8 GPUs, 8 engines": (8, EIGHT_ENGINES, 1.5),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_second_beside_others(situation: str, tmp_path_factory: pytest.TempPathFactory, results: Results) -> None:
    """Let all three run at the same time, over the same library, and scrape each once a second.

    Ours also reads the engine's page and /proc, and derives; the peer also reads the host's metrics, and asks NVML for
    clocks, PCIe and NVLink, which this library does not have.
    """
    gpus, page, ratio_limit = SITUATIONS[situation]
    own, theirs = runtime(), environment(PEER, PEER)
    if own is None or theirs is None:
        pytest.skip("the package index does not offer what is compared")
    nvml = quiet_nvml(tmp_path_factory.mktemp("nvml"), gpus)
    with EngineServer(busy(page)) as engine, ExitStack() as stack:
        running = (
            stack.enter_context(ours(own, engine.url, nvml, SAMPLE_INTERVAL_SECONDS="1")),
            stack.enter_context(peer(theirs, nvml, gpus - 1)),
            stack.enter_context(naive(own, engine.url, nvml)),
        )
        _scrapes(running, SETTLE_SECONDS)
        cpu_before = [exporter.cpu_seconds() for exporter in running]
        _scrapes(running, SECONDS)
        cpu = [
            1e3 * (exporter.cpu_seconds() - was) / SECONDS for exporter, was in zip(running, cpu_before, strict=True)
        ]
        memory = [exporter.resident_bytes() / MIB for exporter in running]

    shown = " / ".join(f"{milliseconds:.3g}" for milliseconds in cpu)
    results.note(f"CPU per second, {situation}: ours / {PEER} / naive", f"{shown} ms")
    results.at_most(ratio_limit, f"CPU of ours over the peer's, {situation}", cpu[0] / cpu[1], " times")
    results.note(f"CPU of the naive one over ours, {situation}", f"{cpu[2] / cpu[0]:.3g} times")
    results.note(
        f"memory, {situation}: ours / {PEER} / naive", " / ".join(f"{mebibytes:.3g}" for mebibytes in memory) + " MiB"
    )


def _scrapes(running: tuple[Exporter, ...], seconds: int) -> None:
    due = time.monotonic()
    for _ in range(seconds):
        due += 1
        for exporter in running:
            exporter.scrape()
        time.sleep(max(0.0, due - time.monotonic()))
