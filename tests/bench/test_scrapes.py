from __future__ import annotations

import pytest
from httpx import URL

from tests.bench.busy_engine import ONE_ENGINE, busy
from tests.bench.processes import findings, start
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
        url = URL(running.url)
        for connections, per_second in ((200, 1.0), (500, None)):
            before = len(engine.requests)
            found = findings(start("crowd", str(url.port), str(connections), str(per_second or 0), str(SECONDS)))
            ticks = len(engine.requests) - before
            what = f"{connections} connections, " + (
                "one scrape a second each" if per_second else "as fast as they can"
            )
            results.at_least(found["seconds"] - 2, f"ticks in {found['seconds']:.0f} s, {what}", ticks, "")
            shown = f"{found['scrapes'] / found['seconds']:.0f} scrapes/s, median {1e3 * found['median']:.2g} ms"
            if per_second:
                results.at_most(10, f"/metrics, {what}: p99 ({shown})", 1e3 * found["p99"], " ms")
            else:
                results.note(f"/metrics, {what}: p99", f"{1e3 * found['p99']:.3g} ms ({shown})")


def _measure(running: Daemon, results: Results, situation: str) -> None:
    url = URL(running.url)
    took = scrape(url.host, url.port or 80, SECONDS)
    middle, high = took[len(took) // 2], took[len(took) * 99 // 100]
    what = (
        f"/metrics at 50 scrapes/s from 4 clients, {situation}: p99 (median {1e3 * middle:.2g} ms, {len(took)} scrapes)"
    )
    results.at_most(10, what, 1e3 * high, " ms")
