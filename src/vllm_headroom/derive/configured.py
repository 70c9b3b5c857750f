"""Complete an engine's facts, and list its memory pools."""

from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any, Final

from msgspec.structs import asdict, replace

from vllm_headroom.derive.pages import list_named
from vllm_headroom.derive.series import label_engine
from vllm_headroom.model import (
    NO_TOKEN_BYTES,
    EngineOptions,
    EnginePage,
    EngineProcess,
    EngineReading,
    Failure,
    Pool,
    ProbedProcess,
    ProbeReadings,
    SchedulerReading,
    TokenBytes,
)
from vllm_headroom.model.families import GROUPED_MODELS
from vllm_headroom.units import GIB, LARGEST_EXACT_BYTES
from vllm_headroom.vocabulary import HostPart, Role

_OPTIONS: Final = {
    "max_num_seqs": "max_num_seqs",
    "gpu_memory_utilization_ratio": "gpu_memory_utilization",
    "kv_cache_dtype": "kv_cache_dtype",
    "kv_cache_memory_bytes": "kv_cache_memory_bytes",
}
"""The option that sets each field of EngineReading. The option is used if the field is missing from
the page.
"""

OFFLOAD_FACTOR: Final = 1.92
"""A KV-cache tier in host memory took this many times its configured size (vllm#53042). Offloaded
weights took 1.9 times their size (vllm#56410).
"""

MULTIMODAL_CACHE_GB: Final = 4.0
"""vLLM's default for --mm-processor-cache-gb (vllm/config/multimodal.py)."""


def find_schedulers(
    page: EnginePage, processes: tuple[ProbedProcess, ...]
) -> dict[tuple[str, str], SchedulerReading]:
    """Return the scheduler of each engine on the page, by the engine's labels.

    Engines and schedulers are matched by data-parallel rank. A single engine and a single scheduler
    always match. An engine without a matching scheduler is omitted.
    """
    schedulers = []
    by_rank = {}
    for process in processes:
        if process.scheduler is not None:
            schedulers.append(process.scheduler)
            if process.data_parallel_rank is not None:
                by_rank[str(process.data_parallel_rank)] = process.scheduler
    engines = list_named(page)
    # A single engine may have no rank on the page or in the probe's file.
    if len(engines) == 1 and len(schedulers) == 1:
        return {label_engine(engines[0]): schedulers[0]}
    return {
        label_engine(engine): by_rank[engine.engine]
        for engine in engines
        if engine.engine in by_rank
    }


def complete_page(
    page: EnginePage | Failure,
    probe: ProbeReadings | Failure | None,
    options: EngineOptions | None,
    model: TokenBytes | None = None,
) -> EnginePage | Failure:
    """Return the page with each engine's facts from the probe and the command line.

    Facts from the probe replace those on the page. An option adds a fact only if neither the page
    nor the probe has it. While an engine core's probe is silent, the facts that it reported last
    are kept. In some models, groups of layers share the cache's blocks. Whether layers share blocks
    shows in `model` or in the model's name in the options. For these models, a capacity computed
    from the number of blocks is dropped. A failure is returned unchanged.
    """
    if isinstance(page, Failure):
        return page
    schedulers = {}
    if isinstance(probe, ProbeReadings):
        schedulers = find_schedulers(page, probe.present + probe.silent)
    engines = []
    has_groups = _has_groups(options, model)
    for engine in page.engines:
        scheduler = schedulers.get(label_engine(engine))
        # Where both supply a fact, the probe's value takes precedence.
        facts = _list_option_facts(engine, options) | _list_scheduler_facts(scheduler)
        if has_groups and page.has_capacity_of_blocks:
            facts["kv_capacity_tokens"] = None
        engines.append(replace(engine, **facts) if facts else engine)
    return replace(page, engines=tuple(engines))


def _has_groups(options: EngineOptions | None, model: TokenBytes | None) -> bool:
    """Return whether the model's layers are known to form groups that share the cache's blocks.

    The model's name on the page is not used, because it may be an alias.
    """
    if model is not None and model("auto", 1) == NO_TOKEN_BYTES:
        return True
    name = None if options is None else options.model
    return name is not None and GROUPED_MODELS.search(name) is not None


def _list_scheduler_facts(scheduler: SchedulerReading | None) -> dict[str, Any]:
    """Return the facts that the probe reports about an engine, keyed by field of EngineReading."""
    if scheduler is None:
        return {}
    return {name: float(value) for name, value in asdict(scheduler).items() if value is not None}


def _list_option_facts(engine: EngineReading, options: EngineOptions | None) -> dict[str, Any]:
    """Return the facts that options set but the page lacks, keyed by field of EngineReading."""
    facts = {}
    for fact, option in _OPTIONS.items():
        value = getattr(options, option, None)
        if value and getattr(engine, fact) is None:
            facts[fact] = value
    return facts


def list_pools(
    page: EnginePage | Failure,
    processes: tuple[EngineProcess, ...] | Failure,
    options: EngineOptions | None,
) -> tuple[Pool, ...]:
    """Return the pools in this machine's host memory that vLLM is configured to fill.

    Only pools that the page or the command line shows are returned.
    """
    if options is None:
        options = EngineOptions()
    engines: dict[str, EngineReading] = {}
    if not isinstance(page, Failure):
        engines = {engine.engine: engine for engine in page.engines}
    counts = Counter[Role]()
    if not isinstance(processes, Failure):
        counts.update(process.role for process in processes)
    # A core without its own process runs in the server. A worker without its own process runs in
    # the core.
    core = Role.ENGINE_CORE if counts[Role.ENGINE_CORE] else Role.API_SERVER
    worker = Role.WORKER if counts[Role.WORKER] else core
    # If a container hides its processes, one worker is assumed.
    workers = counts[worker] or 1

    pools = [
        _size_kv_offload(engines.values(), options, worker, workers),
        _make_pool(HostPart.WEIGHTS_OFFLOAD, worker, workers * (options.cpu_offload_gb or 0) * GIB),
        *_size_multimodal_caches(engines.values(), options, core, counts),
    ]
    return tuple(pool for pool in pools if 0 < pool.size_bytes <= LARGEST_EXACT_BYTES)


def _size_kv_offload(
    engines: Collection[EngineReading], options: EngineOptions, worker: Role, workers: int
) -> Pool:
    """Return the host-memory pool for KV cache: every engine's tier plus every worker's LMCache."""
    tiers_bytes = sum(engine.kv_offload_bytes or 0 for engine in engines)
    # If the page shows no tier, each engine is assumed to have the configured one.
    if not tiers_bytes:
        option_bytes = (options.kv_offloading_size or 0) * GIB
        tier_bytes = option_bytes or options.kv_connector_bytes or 0
        tiers_bytes = tier_bytes * max(1, len(engines))
    # The configured size of LMCache is per worker. The size of vLLM's own tier covers all workers
    # of an engine.
    lmcache_bytes = (options.lmcache_gb or 0) * GIB * workers
    return _make_pool(HostPart.KV_OFFLOAD, worker, tiers_bytes + lmcache_bytes)


def _size_multimodal_caches(
    engines: Collection[EngineReading],
    options: EngineOptions,
    core: Role,
    counts: Counter[Role],
) -> Iterator[Pool]:
    """Yield the pools for the caches of processed images.

    Every API server and every engine core has a multimodal cache (vllm/config/multimodal.py).
    `core` is the role of the processes that run the engine cores.
    """
    cache_bytes = (_find_multimodal_cache_gb(engines, options) or 0) * GIB
    servers = options.api_server_count or counts[Role.API_SERVER] or 1
    yield _make_pool(HostPart.MULTIMODAL_CACHE, Role.API_SERVER, servers * cache_bytes)
    if core is not Role.API_SERVER:
        yield _make_pool(HostPart.MULTIMODAL_CACHE, core, counts[core] * cache_bytes)


def _find_multimodal_cache_gb(
    engines: Collection[EngineReading], options: EngineOptions
) -> float | None:
    """Return one cache's size in GiB.

    Returns None if there is no cache. Also returns None if a file may set the size.
    """
    if options.mm_processor_cache_gb is not None:
        return options.mm_processor_cache_gb
    is_used = any(engine.multimodal_cache_queries_total for engine in engines)
    # A configuration file may set a size other than vLLM's default.
    if not is_used or options.config:
        return None
    return MULTIMODAL_CACHE_GB


def _make_pool(part: HostPart, role: Role, size_bytes: float) -> Pool:
    return Pool(part=part, role=role, size_bytes=int(size_bytes))
