"""What vLLM was configured to do, by its command line and page."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.samples import engine, failure, gpu, page, snapshot, values
from vllm_headroom import catalog
from vllm_headroom.derive.configured import complete_page, list_pools
from vllm_headroom.derive.discrepancy import derive_discrepancy
from vllm_headroom.derive.host_memory import derive_host_memory
from vllm_headroom.derive.kv_cache import derive_kv_cache
from vllm_headroom.model import (
    NO_TOKEN_BYTES,
    EngineOptions,
    EnginePage,
    EngineProcess,
    EngineReading,
    Failure,
    Pool,
    TokenBytes,
)
from vllm_headroom.units import GIB
from vllm_headroom.vocabulary import HostPart, Role, Source

OPTIONS = EngineOptions(max_num_seqs=64, gpu_memory_utilization=0.8, kv_cache_dtype="fp8")


def complete(reading: EngineReading, options: EngineOptions | None = OPTIONS) -> EnginePage:
    completed_page = complete_page(page(reading), None, options)

    assert isinstance(completed_page, EnginePage)

    return completed_page


def test_the_command_line_gives_what_the_page_lacks() -> None:
    (rust,) = complete(engine(running=1.0)).engines
    (python,) = complete(engine(gpu_memory_utilization_ratio=0.9, kv_cache_dtype="auto")).engines

    assert (rust.max_num_seqs, rust.gpu_memory_utilization_ratio, rust.kv_cache_dtype) == (64, 0.8, "fp8")
    assert (python.max_num_seqs, python.gpu_memory_utilization_ratio, python.kv_cache_dtype) == (64, 0.9, "auto")
    assert complete(engine(), None).engines == (engine(),)
    assert complete_page(failure(Source.ENGINE), None, OPTIONS) == failure(Source.ENGINE)


def test_a_budget_of_the_command_line_is_compared_with_what_is_held() -> None:
    held_gpus = (gpu(total=1000, engine=900),)

    samples = derive_discrepancy(snapshot(engines=complete(engine()), gpus=held_gpus), configured_bytes=None)
    sized_page = complete(engine(), replace(OPTIONS, kv_cache_memory_bytes=100))

    assert list(values(samples, catalog.MEMORY_REPORTED).values()) == [800.0]
    assert not derive_discrepancy(snapshot(engines=sized_page, gpus=held_gpus), configured_bytes=None)


@pytest.mark.parametrize(
    ("model", "configuration", "capacity"),
    [
        ("google/gemma-3-27b-it", None, None),
        ("/models/gemma-3-27b-it", None, None),
        ("/models/chat", lambda _dtype, _gpus: NO_TOKEN_BYTES, None),
        ("/models/chat", lambda _dtype, _gpus: 131_072, 255_952.0),
        ("/models/chat", None, 255_952.0),
        (None, lambda _dtype, _gpus: NO_TOKEN_BYTES, None),
        (None, None, 255_952.0),
    ],
)
def test_blocks_give_no_capacity_of_a_model_with_groups_under_an_alias(
    model: str | None, configuration: TokenBytes | None, capacity: float | None
) -> None:
    reported = page(engine(model_name="chat", kv_capacity_tokens=255_952.0))
    counted = replace(reported, has_capacity_of_blocks=True)
    completed_page = complete_page(counted, None, EngineOptions(model=model), configuration)

    assert isinstance(completed_page, EnginePage)
    assert completed_page.engines[0].kv_capacity_tokens == capacity
    assert complete_page(reported, None, EngineOptions(model=model), configuration) == reported


def test_a_model_with_groups_has_no_bytes_either() -> None:
    sample = snapshot(engines=page(engine(kv_capacity_tokens=10.0, kv_cache_dtype="auto")), gpus=(gpu(),))
    served = replace(sample, token_bytes=lambda _dtype, _gpus: NO_TOKEN_BYTES)

    assert not values(derive_kv_cache(served, bytes_per_token=None), catalog.ENGINE_KV_CAPACITY_BYTES)


def test_the_served_model_gives_bytes_unless_the_operator_did() -> None:
    sample = snapshot(engines=complete(engine(kv_capacity_tokens=10.0)), gpus=(gpu(),))
    served = replace(sample, token_bytes=lambda dtype, gpus: 7 if (dtype, gpus) == ("fp8", 1) else None)

    assert not values(derive_kv_cache(sample, bytes_per_token=None), catalog.ENGINE_KV_CAPACITY_BYTES)
    assert list(values(derive_kv_cache(served, bytes_per_token=None), catalog.ENGINE_KV_CAPACITY_BYTES).values()) == [
        70
    ]
    assert list(values(derive_kv_cache(served, bytes_per_token=2.0), catalog.ENGINE_KV_CAPACITY_BYTES).values()) == [20]


def processes(*roles: Role) -> tuple[EngineProcess, ...]:
    return tuple(
        EngineProcess(pid=pid, role=role, rss_bytes=1, started_at_seconds=1.0) for pid, role in enumerate(roles)
    )


def pools(
    *engines: EngineReading, roles: tuple[Role, ...] = (Role.API_SERVER, Role.ENGINE_CORE), **option_fields: Any
) -> dict[tuple[HostPart, Role | None], float]:
    listed_pools = list_pools(page(*engines), processes(*roles), EngineOptions(**option_fields))
    return {(pool.part, pool.role): pool.size_bytes / GIB for pool in listed_pools}


CORE, WORKER, SERVER = Role.ENGINE_CORE, Role.WORKER, Role.API_SERVER


def test_a_tier_of_the_kv_cache_is_the_pages_in_bytes_before_the_configured_size() -> None:
    assert pools(engine(kv_offload_bytes=63.0 * GIB), kv_offloading_size=64.0) == {(HostPart.KV_OFFLOAD, CORE): 63.0}
    assert pools(engine(), kv_offloading_size=64.0) == {(HostPart.KV_OFFLOAD, CORE): 64.0}
    assert pools(engine("0"), engine("1"), kv_offloading_size=64.0) == {(HostPart.KV_OFFLOAD, CORE): 128.0}


def test_a_connectors_memory_is_of_each_engine_and_lmcaches_of_each_worker() -> None:
    two = (SERVER, CORE, WORKER, WORKER)

    assert pools(engine("0"), engine("1"), kv_connector_bytes=8.0 * GIB) == {(HostPart.KV_OFFLOAD, CORE): 16.0}
    assert pools(engine(), roles=two, lmcache_gb=20.5) == {(HostPart.KV_OFFLOAD, WORKER): 41.0}
    assert pools(engine(), roles=two, lmcache_gb=1.0, kv_connector_bytes=8.0 * GIB) == {
        (HostPart.KV_OFFLOAD, WORKER): 10.0
    }


def test_offloaded_weights_are_of_each_gpus_process() -> None:
    two = (SERVER, CORE, WORKER, WORKER)

    assert pools(roles=two, cpu_offload_gb=10.0) == {(HostPart.WEIGHTS_OFFLOAD, WORKER): 20.0}
    assert pools(cpu_offload_gb=10.0) == {(HostPart.WEIGHTS_OFFLOAD, CORE): 10.0}


def test_the_cache_of_images_is_in_every_server_and_core_and_counts_once_it_is_used() -> None:
    used = engine(multimodal_cache_queries_total=3.0)

    assert pools(engine(multimodal_cache_queries_total=0.0)) == {}
    assert pools(used) == {(HostPart.MULTIMODAL_CACHE, SERVER): 4.0, (HostPart.MULTIMODAL_CACHE, CORE): 4.0}
    assert pools(used, mm_processor_cache_gb=0.0) == {}
    assert pools(used, config="/etc/vllm.yaml") == {}, "the file may set another size"
    assert pools(engine(), mm_processor_cache_gb=2.0, api_server_count=3, roles=(SERVER, CORE, CORE)) == {
        (HostPart.MULTIMODAL_CACHE, SERVER): 6.0,
        (HostPart.MULTIMODAL_CACHE, CORE): 4.0,
    }
    assert pools(used, roles=(SERVER,)) == {(HostPart.MULTIMODAL_CACHE, SERVER): 4.0}


def test_a_pool_beyond_any_machine_is_none() -> None:
    """A trace would refuse it, and with it the whole sample."""
    assert pools(kv_offloading_size=1e12) == {}


@pytest.mark.parametrize("page_or_failure", [failure(Source.ENGINE), page()])
def test_without_page_and_processes_the_command_line_still_plans(page_or_failure: EnginePage | Failure) -> None:
    listed_pools = list_pools(page_or_failure, failure(Source.PROCESS), EngineOptions(kv_offloading_size=1.0))

    assert listed_pools == (Pool(part=HostPart.KV_OFFLOAD, role=Role.API_SERVER, size_bytes=GIB),)
    assert list_pools(page_or_failure, failure(Source.PROCESS), None) == ()


def test_what_is_planned_is_exported_by_part() -> None:
    planned_snapshot = replace(
        snapshot(),
        pools=(
            Pool(part=HostPart.MULTIMODAL_CACHE, role=SERVER, size_bytes=4),
            Pool(part=HostPart.MULTIMODAL_CACHE, role=CORE, size_bytes=8),
            Pool(part=HostPart.KV_OFFLOAD, role=None, size_bytes=100),
        ),
    )

    assert values(derive_host_memory(planned_snapshot), catalog.HOST_MEMORY_PLANNED) == {("multimodal_cache",): 12}
