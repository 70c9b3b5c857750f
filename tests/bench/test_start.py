from __future__ import annotations

import time
from contextlib import AbstractContextManager
from statistics import median

import pytest

from tests.bench.busy_engine import ONE_ENGINE, busy
from tests.bench.exporters import PEER, Exporter, environment, ours, peer, runtime
from tests.bench.results import Results
from tests.fakes.engine_server import EngineServer
from tests.fakes.nvml.library import FakeNvml

pytestmark = pytest.mark.bench

STARTS = 5


def test_start_to_the_first_complete_page(nvml: FakeNvml, results: Results) -> None:
    """Start ours and the peer in turns, so that both see the same machine."""
    own, theirs = runtime(), environment(PEER, PEER)
    if own is None or theirs is None:
        pytest.skip("the package index does not offer what is compared")
    with EngineServer(busy(ONE_ENGINE)) as engine:
        pairs = [(_start(ours(own, engine.url, nvml)), _start(peer(theirs, nvml, 7))) for _ in range(STARTS)]
    seconds, cpu = (median(own_pair[position] for own_pair, _ in pairs) for position in (0, 1))
    their_seconds, their_cpu = (median(peer_pair[position] for _, peer_pair in pairs) for position in (0, 1))

    title = f"start to the first complete /metrics, live engine, median of {STARTS}"
    results.at_most(0.45, f"{title}: CPU", cpu, " s")
    results.note(f"CPU of {PEER} until its first page", f"{their_cpu:.3g} s")
    results.note(f"{title}: ours / {PEER}, with all that runs beside them", f"{seconds:.3g} / {their_seconds:.3g} s")


def _start(exporter: AbstractContextManager[Exporter]) -> tuple[float, float]:
    """Return the seconds, and the seconds of CPU, until the page is complete."""
    began = time.monotonic()
    with exporter as running:
        return time.monotonic() - began, running.cpu_seconds()
