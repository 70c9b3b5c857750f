from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from vllm_headroom.commands.demo.page import CACHE_CONFIG, VllmCollector
from vllm_headroom.commands.demo.scenario import TABLE
from vllm_headroom.commands.demo.traffic import CAPACITY_TOKENS
from vllm_headroom.commands.demo.world import World
from vllm_headroom.model import EnginePage
from vllm_headroom.parse.page import parse_engines

EPOCH_SECONDS = 1_790_000_000.0
BASE = ("engine", "model_name")

SHAPES = {
    "process_start_time_seconds": ("gauge", ()),
    "process_resident_memory_bytes": ("gauge", ()),
    "vllm:num_requests_running": ("gauge", BASE),
    "vllm:num_requests_waiting": ("gauge", BASE),
    "vllm:num_requests_waiting_by_reason": ("gauge", (*BASE, "reason")),
    "vllm:engine_sleep_state": ("gauge", (*BASE, "sleep_state")),
    "vllm:kv_cache_usage_perc": ("gauge", BASE),
    "vllm:prefix_cache_queries_total": ("counter", BASE),
    "vllm:prefix_cache_hits_total": ("counter", BASE),
    "vllm:num_preemptions_total": ("counter", BASE),
    "vllm:prompt_tokens_total": ("counter", BASE),
    "vllm:generation_tokens_total": ("counter", BASE),
    "vllm:request_success_total": ("counter", ("engine", "finished_reason", "model_name")),
    "vllm:iteration_tokens_total_bucket": ("histogram", (*BASE[:1], "le", *BASE[1:])),
    "vllm:iteration_tokens_total_count": ("histogram", BASE),
    "vllm:iteration_tokens_total_sum": ("histogram", BASE),
    "vllm:cache_config_info": ("gauge", tuple(sorted(CACHE_CONFIG))),
}
"""As on a recorded page of vLLM 0.32."""


def page(world: World) -> str:
    registry = CollectorRegistry()
    registry.register(VllmCollector(world, EPOCH_SECONDS))
    return generate_latest(registry).decode()


def parsed(world: World) -> EnginePage:
    understood = parse_engines(page(world))
    assert isinstance(understood, EnginePage)
    return understood


def test_the_page_has_the_families_and_labels_of_vllm() -> None:
    shapes = {
        sample.name: (family.type, tuple(sorted(sample.labels)))
        for family in text_string_to_metric_families(page(World(TABLE["healthy"])))
        for sample in family.samples
        if not sample.name.endswith("_created")
    }

    assert shapes == SHAPES


def test_counters_say_when_they_began_as_vllm_does() -> None:
    created = {
        sample.name: sample.value
        for family in text_string_to_metric_families(page(World(TABLE["healthy"])))
        for sample in family.samples
        if sample.name.endswith("_created")
    }
    counters = [name for name, (kind, _) in SHAPES.items() if kind == "counter"]

    assert sorted(created) == sorted(name.replace("_total", "_created") for name in counters)
    assert set(created.values()) == {EPOCH_SECONDS - 3_600}


@pytest.mark.parametrize("scenario", list(TABLE))
def test_the_daemon_reads_from_the_page_what_the_world_is(scenario: str) -> None:
    world = World(TABLE[scenario])
    world.advance(3_000)
    (engine,) = parsed(world).engines
    traffic = world.engine.traffic

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

    assert {name for name, found in inputs.items() if not found} == {"prefix_cache_hit_rate", "kv_cache_memory_bytes"}
