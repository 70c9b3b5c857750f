from __future__ import annotations

import asyncio
import re

import pytest

from tests.contract.recorded import FOLDER
from vllm_headroom.model import EnginePage, Failure
from vllm_headroom.parse.engines import parse_engines
from vllm_headroom.vocabulary import Reason
from vllm_headroom_tools.demo.run import SimulatedEngine, render_engine_page
from vllm_headroom_tools.demo.world import CAPACITY_TOKENS, TABLE, World

EPOCH_SECONDS = 1_790_000_000.0


def parsed(world: World) -> EnginePage:
    understood = parse_engines(render_engine_page(world.engine, EPOCH_SECONDS))
    assert isinstance(understood, EnginePage)
    return understood


@pytest.mark.parametrize("scenario", [name for name in TABLE if name != "stranded"])
def test_the_daemon_reads_from_the_page_what_the_world_is(scenario: str) -> None:
    world = World(TABLE[scenario])
    world.advance(3_000)
    (engine,) = parsed(world).engines
    traffic = world.engine

    assert engine.model_name == "simulated-8b"
    assert engine.engine == "0"
    assert engine.running == traffic.running > 0
    assert engine.waiting == traffic.waiting
    assert engine.finished_total == traffic.finished_total > 0
    assert engine.preemptions_total == traffic.preemptions_total
    assert engine.prompt_tokens_total == traffic.prompt_tokens_total > 0
    assert engine.generation_tokens_total == traffic.generation_tokens_total > 0
    assert engine.kv_used_ratio == traffic.kv_used_ratio
    assert engine.kv_capacity_tokens == CAPACITY_TOKENS
    assert engine.prefix_queries_total == traffic.prompt_tokens_total
    assert engine.prefix_hits_total == traffic.prefix_hits_total > 0
    assert engine.awake is True
    assert engine.gpu_memory_utilization_ratio == pytest.approx(0.92)
    assert engine.kv_cache_memory_bytes is None
    assert engine.started_at_seconds == EPOCH_SECONDS + world.engine.started_seconds


def test_all_that_a_page_of_today_can_offer_is_there() -> None:
    inputs = dict(parsed(World(TABLE["healthy"])).inputs)

    assert {name for name, is_offered in inputs.items() if not is_offered} == {
        "prefix_cache_hit_rate",
        "kv_cache_memory_bytes",
    }


def test_there_is_a_page_of_the_present_while_the_engine_serves_and_else_none() -> None:
    world, seconds = World(TABLE["restart"]), 0.0

    def now() -> World:
        world.advance(seconds)
        return world

    def fetched() -> str | Failure:
        return asyncio.run(SimulatedEngine(now, EPOCH_SECONDS).fetch())

    first_page = fetched()
    seconds = 60.0
    later = fetched()
    while world.is_serving:
        seconds += 1.0
        now()
    down = fetched()
    seconds += 121.0

    assert isinstance(first_page, str)
    assert isinstance(later, str)
    assert first_page != later
    assert isinstance(down, Failure)
    assert down.reason is Reason.UNREACHABLE
    assert isinstance(fetched(), str)


def test_the_parts_of_the_page_are_those_of_vllm() -> None:
    """Each name and each label stands on a recorded page."""
    recorded = (FOLDER / "vllm-0.32.0" / "load-waiting.prom").read_text()

    for line in render_engine_page(World(TABLE["healthy"]).engine, EPOCH_SECONDS).splitlines():
        name, _, labels = line.partition(" ")[0].partition("{")
        recorded_line = next(line for line in recorded.splitlines() if line.startswith((f"{name}{{", f"{name} ")))
        assert all(f"{label}=" in recorded_line for label in re.findall(r"(\w+)=", labels))
