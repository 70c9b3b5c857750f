"""What vLLM was configured to do, where its page does not show it: settings of each engine, pools in host memory."""

from collections import Counter
from typing import Any, Final

from msgspec.structs import asdict, replace

from vllm_headroom.derive.readings import label_engine, list_engines, list_named
from vllm_headroom.model import (
    EngineOptions,
    EnginePage,
    EngineProcess,
    Failure,
    Pool,
    ProbedProcess,
    ProbeReadings,
    SchedulerReading,
)
from vllm_headroom.units import GIB, MOST_BYTES
from vllm_headroom.vocabulary import HostPart, Role

_OPTIONS: Final = {
    "max_num_seqs": "max_num_seqs",
    "gpu_memory_utilization_ratio": "gpu_memory_utilization",
    "kv_cache_dtype": "kv_cache_dtype",
    "kv_cache_memory_bytes": "kv_cache_memory_bytes",
}
"""Facts of an engine that an option of the command line gives where the page does not."""

OFFLOAD_FACTOR: Final = 1.92
"""Times the size of a tier of the KV cache that it took (vllm#53042); of offloaded weights 1.9 times (vllm#56410)."""

MULTIMODAL_CACHE_GB: Final = 4.0
"""vLLM's default of --mm-processor-cache-gb (vllm/config/multimodal.py)."""


def find_schedulers(
    page: EnginePage, processes: tuple[ProbedProcess, ...]
) -> dict[tuple[str, str], SchedulerReading]:
    """Return the scheduler of each engine on the page, by its labels.

    They match by data-parallel rank; a single engine and a single scheduler always match.
    """
    cores = [
        (each.data_parallel_rank, each.scheduler)
        for each in processes
        if each.scheduler is not None
    ]
    engines = list_named(page)
    if len(engines) == len(cores) == 1:
        return {label_engine(engines[0]): cores[0][1]}
    by_rank = {str(rank): scheduler for rank, scheduler in cores if rank is not None}
    return {
        label_engine(engine): by_rank[engine.engine]
        for engine in engines
        if engine.engine in by_rank
    }


def complete_page(
    page: EnginePage | Failure, probe: ProbeReadings | Failure | None, options: EngineOptions | None
) -> EnginePage | Failure:
    """Add to each engine the facts that its core's probe has, then those of the command line that are still missing.

    A silent core keeps its last facts.
    """
    if isinstance(page, Failure):
        return page
    known = (
        find_schedulers(page, probe.present + probe.silent)
        if isinstance(probe, ProbeReadings)
        else {}
    )
    engines = []
    for engine in page.engines:
        scheduler = known.get(label_engine(engine))
        inside = {} if scheduler is None else asdict(scheduler)
        facts: dict[str, Any] = {
            name: float(value) for name, value in inside.items() if value is not None
        }
        for fact, option in _OPTIONS.items():
            if getattr(engine, fact) is None and (value := getattr(options, option, None)):
                facts.setdefault(fact, value)
        engines.append(replace(engine, **facts) if facts else engine)
    return replace(page, engines=tuple(engines))


def list_pools(
    page: EnginePage | Failure,
    processes: tuple[EngineProcess, ...] | Failure,
    options: EngineOptions | None,
) -> tuple[Pool, ...]:
    """Return the pools that vLLM was configured to fill on this machine, as far as page and command line show them.

    A tier of the KV cache belongs to each engine, offloaded weights to each GPU's process, and the cache of processed
    images to every API server and engine core (vllm/config/multimodal.py).
    """
    counts = (
        {} if isinstance(processes, Failure) else Counter(process.role for process in processes)
    )
    options = options or EngineOptions()
    engines = (
        {}
        if isinstance(page, Failure)
        else {engine.engine: engine for engine in list_engines(page)}
    )
    core = Role.ENGINE_CORE if counts.get(Role.ENGINE_CORE) else Role.API_SERVER
    worker = Role.WORKER if counts.get(Role.WORKER) else core
    offload_bytes = sum(engine.kv_offload_bytes or 0 for engine in engines.values())
    tier_bytes = (options.kv_offloading_size or 0) * GIB or options.kv_connector_bytes or 0
    offload_bytes = offload_bytes or tier_bytes * max(1, len(engines))
    offload_bytes += (options.lmcache_gb or 0) * GIB * counts.get(worker, 1)
    weights_bytes = (options.cpu_offload_gb or 0) * GIB * counts.get(worker, 1)
    sizes = [
        (HostPart.KV_OFFLOAD, worker, offload_bytes),
        (HostPart.WEIGHTS_OFFLOAD, worker, weights_bytes),
    ]
    cache_gb = options.mm_processor_cache_gb
    if cache_gb is None and any(
        engine.multimodal_cache_queries_total for engine in engines.values()
    ):
        cache_gb = None if options.config else MULTIMODAL_CACHE_GB
    for role in dict.fromkeys((Role.API_SERVER, core)):
        caches = (
            options.api_server_count or counts.get(role, 1)
            if role is Role.API_SERVER
            else counts[role]
        )
        sizes.append((HostPart.MULTIMODAL_CACHE, role, (cache_gb or 0) * GIB * caches))
    pools = (Pool(part=part, role=role, size_bytes=int(n_bytes)) for part, role, n_bytes in sizes)
    return tuple(pool for pool in pools if 0 < pool.size_bytes <= MOST_BYTES)
