from __future__ import annotations

import os
import time

import pytest

from tests.bench.busy_engine import ONE_ENGINE, busy
from tests.bench.exporters import ours, runtime
from tests.bench.growth import SETTLED_TICKS
from tests.bench.processes import findings, start
from tests.bench.results import Results
from tests.fakes.engine_server import EngineServer
from tests.fakes.nvml.library import MIB, FakeNvml

pytestmark = pytest.mark.bench

MINUTES = float(os.environ.get("BENCH_MINUTES", "1"))
TICKS = int(os.environ.get("BENCH_TICKS", "200000"))
SCRAPE_INTERVAL_SECONDS = 5.0


def test_resident_memory(nvml: FakeNvml, results: Results) -> None:
    """Watch the daemon with its default settings while, beside it, the sampler turns as fast as it goes."""
    python = runtime()
    if python is None:
        pytest.skip("the package index does not offer what runs")
    with EngineServer(busy(ONE_ENGINE)) as engine, ours(python, engine.url, nvml) as running:
        growing = start("growth", str(TICKS))
        began, cpu_before = time.monotonic(), running.cpu_seconds()
        while growing.poll() is None or time.monotonic() - began < 60 * MINUTES:
            running.scrape()
            time.sleep(SCRAPE_INTERVAL_SECONDS)
        seconds = time.monotonic() - began
        share = (running.cpu_seconds() - cpu_before) / seconds
        resident = running.resident_bytes()
    grown = findings(growing)

    results.at_most(55, f"resident memory of `run` after {seconds / 60:.0f} min", resident / MIB, " MiB")
    results.note("CPU of `run` with default settings, one scrape in 5 s", f"{100 * share:.2g} % of a core")
    growth = max(0, grown["end"] - grown["settled"])
    title = f"growth of resident memory from tick {SETTLED_TICKS:,} to tick {TICKS:,}"
    results.at_most(1, title, growth / MIB, " MiB")
