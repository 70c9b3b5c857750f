from __future__ import annotations

import pytest
from httpx import URL

from tests.bench.busy_engine import ONE_ENGINE, busy
from tests.bench.processes import cpu_seconds, findings, start
from tests.bench.results import Results
from tests.bench.scrapers import scrape
from tests.fakes.engine_server import EngineServer, hang
from tests.fakes.nvml.library import FakeNvml
from tests.process import Daemon, daemon

pytestmark = pytest.mark.bench

SECONDS = 15.0


def test_scrapes_do_not_wait(nvml: FakeNvml, results: Results) -> None:
    settings = {"SAMPLE_INTERVAL_SECONDS": "1", "GPUS": "all", **nvml.environment()}
    with EngineServer(busy(ONE_ENGINE)) as engine, daemon("run", ENGINE_URL=engine.url, **settings) as running:
        running.sees(lambda page: page.value("source_up", source="engine") == 1, "the engine answers")
        running.sees(lambda page: page.value("source_up", source="nvml") == 1, "the GPUs answer")
        _measure(running, results, "a sample every second")

        engine.answer = hang
        running.sees(lambda page: page.value("source_up", source="engine") == 0, "the engine hangs")
        _measure(running, results, "the engine hangs")

        engine.answer = busy(ONE_ENGINE)
        running.sees(lambda page: page.value("source_up", source="engine") == 1, "the engine answers again")
        nvml.hangs = {"nvmlDeviceGetMemoryInfo_v2": 3600}
        nvml.write()
        running.sees(lambda page: page.value("source_up", source="nvml") == 0, "the driver hangs")
        _measure(running, results, "an NVML call hangs")


def test_a_crowd_costs_no_tick(nvml: FakeNvml, results: Results) -> None:
    """Let 200 connections scrape once a second each, then 500 as fast as they can, and count the ticks."""
    settings = {"SAMPLE_INTERVAL_SECONDS": "1", "GPUS": "all", **nvml.environment()}
    with EngineServer(busy(ONE_ENGINE)) as engine, daemon("run", ENGINE_URL=engine.url, **settings) as running:
        running.sees(lambda page: page.value("source_up", source="engine") == 1, "the engine answers")
        slow = _crowd(running, engine, results, connections=200, per_second=1)
        fast = _crowd(running, engine, results, connections=500, per_second=0)

    results.note("/metrics, 500 connections, as fast as they can: p99", f"{1e3 * fast:.3g} ms")
    results.at_most(10, "/metrics, 200 connections, one scrape a second each: p99", 1e3 * slow, " ms")


def _crowd(running: Daemon, engine: EngineServer, results: Results, *, connections: int, per_second: int) -> float:
    """Return the p99 of a crowd's scrapes, as seen by it, in seconds."""
    requests_before, cpu = len(engine.requests), cpu_seconds(running.process.pid)
    crowd_figures = findings(
        start("crowd", str(URL(running.url).port), str(connections), str(per_second), str(SECONDS))
    )
    ticks, cpu = len(engine.requests) - requests_before, cpu_seconds(running.process.pid) - cpu
    title = f"{connections} connections"
    results.at_least(crowd_figures["seconds"] - 2, f"ticks in {crowd_figures['seconds']:.0f} s, {title}", ticks, "")
    scrapes_per_second = crowd_figures["scrapes"] / crowd_figures["seconds"]
    shown = f"{scrapes_per_second:.0f} scrapes/s, median {1e3 * crowd_figures['median']:.2g} ms"
    results.note(f"CPU per scrape, all included, {title} ({shown})", f"{1e6 * cpu / crowd_figures['scrapes']:.3g} us")
    return float(crowd_figures["p99"])


def _measure(running: Daemon, results: Results, situation: str) -> None:
    url = URL(running.url)
    took = scrape(url.host, url.port or 80, SECONDS)
    middle, high = took[len(took) // 2], took[len(took) * 99 // 100]
    title = (
        f"/metrics at 50 scrapes/s from 4 clients, {situation}: p99 (median {1e3 * middle:.2g} ms, {len(took)} scrapes)"
    )
    results.at_most(10, title, 1e3 * high, " ms")
