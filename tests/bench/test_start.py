from __future__ import annotations

import time
from statistics import median

import pytest

from tests.bench.busy_engine import ONE_ENGINE, busy
from tests.bench.results import Results
from tests.fakes.engine_server import EngineServer
from tests.fakes.nvml.library import FakeNvml
from tests.process import daemon

pytestmark = pytest.mark.bench

STARTS = 5


def test_start_to_the_first_complete_page(nvml: FakeNvml, results: Results) -> None:
    with EngineServer(busy(ONE_ENGINE)) as engine:
        seconds = [_seconds(engine, nvml) for _ in range(STARTS)]

    results.at_most(1.5, "start to the first complete /metrics, live engine: median of 5", median(seconds), " s")


def _seconds(engine: EngineServer, nvml: FakeNvml) -> float:
    began = time.monotonic()
    with daemon("run", ENGINE_URL=engine.url, GPUS="all", **nvml.environment()) as running:
        page = running.sees(lambda page: page.has("engine_requests_running"), "the engine's series are there")
        seconds = time.monotonic() - began
    assert page.has("memory_per_running_request_bytes", gpu="7")
    return seconds
