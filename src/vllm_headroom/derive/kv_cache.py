"""The size of the KV cache and its use per request."""

from collections.abc import Iterator
from math import ceil, floor, isfinite
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.pages import list_engines, list_named
from vllm_headroom.derive.series import label_engine, limit_remembered
from vllm_headroom.derive.sums import sum_known
from vllm_headroom.model import EngineReading, Sample, Snapshot, TokenBytes
from vllm_headroom.vocabulary import EngineState, MemoryPart


def derive_kv_cache(
    snapshot: Snapshot, *, bytes_per_token: float | None, model: TokenBytes | None = None
) -> tuple[Sample, ...]:
    """Return KV-cache samples per engine; `bytes_per_token` is per token on all GPUs of one engine.

    vLLM does not export bytes per token: unless configured, they are the cache's size by the probe
    over its capacity in tokens, else `model`, or the model that the engine's processes load,
    computes them from the dtype. Without any of them there are tokens and no bytes. Samples per
    running request are absent while nothing runs or nothing is held.
    """
    engines = list_named(snapshot.page)
    if bytes_per_token is None:
        bytes_per_token = _measure_bytes_per_token(snapshot, engines)
    if model is None:
        model = snapshot.token_bytes
    gpus = _count_gpus_per_engine(snapshot)
    samples: list[Sample] = []
    for engine in engines:
        token_bytes = bytes_per_token
        if token_bytes is None and model is not None and engine.kv_cache_dtype is not None:
            token_bytes = model(engine.kv_cache_dtype, gpus)
        samples += _derive_engine_cache(engine, token_bytes)
    return tuple(samples)


def _measure_bytes_per_token(
    snapshot: Snapshot, engines: tuple[EngineReading, ...]
) -> float | None:
    """Return the size of the KV cache over its capacity; None where the probe does not have it."""
    sizes = []
    for gpu in snapshot.owned_gpus:
        parts = () if gpu.inside is None else gpu.inside.parts
        # A cache that sleep has dropped is unknown, not free.
        sizes.append(dict(parts).get(MemoryPart.KV_CACHE))
    cache_bytes = sum_known(sizes)
    capacity_tokens = sum_known(engine.kv_capacity_tokens for engine in engines)
    if not cache_bytes or not capacity_tokens:
        return None
    return cache_bytes / capacity_tokens


def _count_gpus_per_engine(snapshot: Snapshot) -> int | None:
    """Return the most GPUs that one engine can have; None without any."""
    ranks = {engine.engine for engine in list_engines(snapshot.page)}
    return ceil(len(snapshot.owned_gpus) / max(1, len(ranks))) or None


def _derive_engine_cache(engine: EngineReading, token_bytes: float | None) -> Iterator[Sample]:
    """Yield the samples of one engine; no bytes without `token_bytes`."""
    labels = label_engine(engine)
    capacity_tokens = engine.kv_capacity_tokens
    request_tokens = count_tokens_per_request(engine)
    if engine.kv_token_ratio is not None:
        yield Sample(catalog.ENGINE_KV_TOKENS_USED, labels, engine.kv_token_ratio)
    if token_bytes is not None and capacity_tokens is not None:
        yield Sample(catalog.ENGINE_KV_CAPACITY_BYTES, labels, token_bytes * capacity_tokens)
    if request_tokens is not None:
        yield Sample(catalog.ENGINE_KV_TOKENS_PER_REQUEST, labels, request_tokens)
    if token_bytes is not None and request_tokens is not None:
        yield Sample(catalog.ENGINE_KV_BYTES_PER_REQUEST, labels, token_bytes * request_tokens)


def count_tokens_per_request(engine: EngineReading) -> float | None:
    """Return the average tokens per running request; None while nothing runs or nothing is held."""
    if not engine.running or not engine.kv_used_ratio or engine.kv_capacity_tokens is None:
        return None
    tokens = engine.kv_used_ratio * engine.kv_capacity_tokens / engine.running
    return tokens if isfinite(tokens) else None


WINDOW_SECONDS: Final = 300.0
"""The hit ratio is that of the last five minutes."""

STEPS: Final = 60
"""Counts are kept a sixtieth of the window apart, which bounds memory at any sampling interval."""


class Count(Struct, frozen=True, kw_only=True):
    """The counters at one moment."""

    seconds: float
    queries: float
    hits: float


class PrefixCacheState(Struct, frozen=True, kw_only=True):
    """The counts of each engine, by the labels `model_name` and `engine`.

    They are those within the window and the last one before it, oldest first. An engine that left
    the page is dropped after a window.
    """

    engines: dict[tuple[str, str], tuple[Count, ...]] = field(default_factory=dict)


def derive_prefix_cache(
    state: PrefixCacheState, snapshot: Snapshot
) -> tuple[PrefixCacheState, tuple[Sample, ...]]:
    """Return hits over queries of the last 5 minutes per engine; absent without queries then.

    vLLM V0 has no counters: there the ratio is the average since the engine's start.
    """
    if snapshot.engine_status is not None and not snapshot.engine_status.in_service:
        return PrefixCacheState(), ()
    now = snapshot.monotonic_seconds
    engines = {label_engine(engine): engine for engine in list_engines(snapshot.page)}
    counts_by_engine = dict(state.engines)
    samples = []
    for labels, engine in engines.items():
        counts = _update_counts(counts_by_engine.get(labels, ()), engine, now)
        ratio = engine.prefix_hit_lifetime_ratio
        if counts:
            counts_by_engine[labels] = counts
            ratio = _measure_hit_ratio(counts)
        if ratio is not None:
            samples.append(Sample(catalog.ENGINE_PREFIX_HIT_RATIO, labels, ratio))
    recent_counts = {
        labels: counts
        for labels, counts in limit_remembered(counts_by_engine, engines).items()
        if labels in engines or now - counts[-1].seconds < WINDOW_SECONDS
    }
    return PrefixCacheState(engines=recent_counts), tuple(samples)


def _update_counts(
    counts: tuple[Count, ...], engine: EngineReading, now: float
) -> tuple[Count, ...]:
    """Drop what is too old and add the engine's counters, if it has any; `now` is in seconds.

    A counter that fell has restarted at 0.
    """
    old = sum(now - count.seconds >= WINDOW_SECONDS for count in counts)
    # The last one before the window is where the window begins.
    counts = counts[max(0, old - 1) :]
    queries = engine.prefix_queries_total
    hits = engine.prefix_hits_total
    if queries is None or hits is None:
        return counts
    if counts and (queries < counts[-1].queries or hits < counts[-1].hits):
        counts = (Count(seconds=now, queries=0.0, hits=0.0),)
    elif len(counts) > 1 and counts[-1].seconds - counts[-2].seconds < WINDOW_SECONDS / STEPS:
        counts = counts[:-1]
    return (*counts, Count(seconds=now, queries=queries, hits=hits))


def _measure_hit_ratio(counts: tuple[Count, ...]) -> float | None:
    """Return hits over queries from the first count to the last; None without queries."""
    queries = counts[-1].queries - counts[0].queries
    hits = counts[-1].hits - counts[0].hits
    if queries <= 0:
        return None
    return min(1.0, hits / queries)


FULL_BATCH_SAMPLES: Final = 3
"""Samples with requests waiting at the highest load before it counts as the limit: one queue proves
nothing."""


class Batch(Struct, frozen=True, kw_only=True):
    """What is known of the limit of requests that one engine runs at once."""

    most_running: float = 0.0
    """The most requests seen running."""

    waited_samples: int = 0
    """How often others waited at that load although the KV cache had room for one more."""

    is_reported: bool = False
    """Whether the limit was ever read: while it is not readable, it is unknown."""


class Batches(Struct, frozen=True, kw_only=True):
    """The batches of one run of the engine, by the labels `model_name` and `engine`."""

    restarts: int = 0
    engines: dict[tuple[str, str], Batch] = field(default_factory=dict)


def derive_admission(state: Batches, snapshot: Snapshot) -> tuple[Batches, tuple[Sample, ...]]:
    """Return how many more requests each engine can run, by its free KV cache and `max_num_seqs`.

    Without that setting, which vLLM's page does not show, the limit is the most that ever ran, once
    others waited at that load for something other than the KV cache. No sample while nothing runs
    or the engine does not serve: the gauges of a sleeping or stalled engine are frozen.
    """
    status = snapshot.engine_status
    if snapshot.page is None:
        return state, ()
    if status is not None and status.state is not EngineState.SERVING:
        return state, ()
    if status is not None and status.restarts != state.restarts:
        state = Batches(restarts=status.restarts)
    batches = {}
    samples = []
    for engine in list_named(snapshot.page):
        labels = label_engine(engine)
        batch = _update_batch(state.engines.get(labels, Batch()), engine)
        batches[labels] = batch
        additional_requests = _count_additional(engine, batch)
        if additional_requests is not None:
            samples.append(Sample(catalog.ENGINE_ADDITIONAL_REQUESTS, labels, additional_requests))
    return replace(state, engines=batches), tuple(samples)


def _update_batch(batch: Batch, engine: EngineReading) -> Batch:
    """Return what is known of an engine's limit with this reading."""
    running = engine.running or 0.0
    is_reported = batch.is_reported or engine.max_num_seqs is not None
    if running > batch.most_running or is_reported != batch.is_reported:
        batch = Batch(most_running=running, is_reported=is_reported)
    has_queue_at_limit = running == batch.most_running and bool(engine.waiting)
    if has_queue_at_limit and _fits_one_more(engine):
        waited_samples = min(FULL_BATCH_SAMPLES, batch.waited_samples + 1)
        batch = replace(batch, waited_samples=waited_samples)
    return batch


def _fits_one_more(engine: EngineReading) -> bool:
    """Return whether the KV cache has room for one more request of the average size."""
    if not engine.running or engine.kv_used_ratio is None:
        return False
    return engine.running > 0 and engine.kv_used_ratio * (1 + 1 / engine.running) <= 1


def _count_additional(engine: EngineReading, batch: Batch) -> float | None:
    """Return how many more requests can run; None where that is unknown."""
    if not engine.running or not engine.kv_used_ratio:
        return None
    limit = None
    if batch.is_reported:
        limit = engine.max_num_seqs
        if limit is None:
            return None
    elif batch.waited_samples >= FULL_BATCH_SAMPLES:
        limit = batch.most_running
    fitting = engine.running * (1.0 - engine.kv_used_ratio) / engine.kv_used_ratio
    if isfinite(fitting):
        fitting = float(floor(fitting))
    if limit is None:
        return fitting
    return min(fitting, max(0.0, limit - engine.running))
