from __future__ import annotations

import pytest

from tests.bench.busy_engine import EIGHT_ENGINES, ONE_ENGINE, busy
from tests.bench.processes import findings, start
from tests.bench.results import Results
from tests.fakes.engine_server import EngineServer
from tests.fakes.nvml.library import FakeNvml

pytestmark = pytest.mark.bench


def test_the_cost_of_a_tick(nvml: FakeNvml, results: Results) -> None:
    with EngineServer(busy(ONE_ENGINE)) as one_server, EngineServer(busy(EIGHT_ENGINES)) as eight:
        costs = findings(start("ticks", one_server.url, eight.url, **nvml.environment()))
    tick, tick_of_eight = costs["tick"]
    whole_page_seconds, whole_of_eight = costs["whole"]
    parse, parse_of_eight = costs["parse"]

    results.at_most(3, "CPU of one tick (fetch, parse, derive, publish), 8 GPUs, 1 engine: median", 1e3 * tick, " ms")
    results.note("CPU of parsing its whole page (51 kB) with prometheus-client", f"{1e3 * whole_page_seconds:.3g} ms")
    results.note("CPU of our parsing of the same page", f"{1e3 * parse:.3g} ms")
    results.at_least(8, "our parsing, cheaper than the whole page's by", whole_page_seconds / parse, " times")
    results.at_least(8, "the whole tick, HTTP and NVML included, cheaper by", whole_page_seconds / tick, " times")
    results.at_most(2.5, "a tick of 8 data-parallel engines against one engine's", tick_of_eight / tick, " times")
    results.note("our parsing of 8 engines, cheaper than the whole page's by", _times(whole_of_eight / parse_of_eight))
    results.note("the whole tick of 8 engines, cheaper by", _times(whole_of_eight / tick_of_eight))


def _times(ratio: float) -> str:
    return f"{ratio:.3g} times"
