"""The size of the KV cache and its use per request."""

from math import floor, isfinite
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.readings import (
    label_engine,
    limit_remembered,
    list_engines,
    list_named,
    sum_known,
)
from vllm_headroom.model import EngineReading, Inside, Sample, Snapshot, TokenBytes
from vllm_headroom.vocabulary import EngineState, MemoryPart


def derive_kv_cache(
    snapshot: Snapshot, *, bytes_per_token: float | None, model: TokenBytes | None = None
) -> tuple[Sample, ...]:
    """Return KV-cache samples per engine; `bytes_per_token` is per token on all GPUs of one engine.

    vLLM does not export bytes per token: unless configured, they are the cache's size by the probe over its capacity in
    tokens, else `model`, or the model that the engine's processes load, computes them from the dtype. Without any of
    them there are tokens and no bytes. Samples per running request are absent while nothing runs or nothing is held.
    """
    model = model or snapshot.token_bytes
    ranks = {engine.engine for engine in list_engines(snapshot.page)}
    gpus = (
        -(-len(snapshot.owned_gpus) // max(1, len(ranks))) or None
    )  # the most that one engine can have
    inside = [
        gpu.inside or Inside() for gpu in snapshot.owned_gpus
    ]  # a cache that sleep has dropped is unknown, not free
    held_bytes = sum_known(dict(each.parts).get(MemoryPart.KV_CACHE) for each in inside)
    tokens = sum_known(engine.kv_capacity_tokens for engine in list_named(snapshot.page))
    measured = held_bytes / tokens if held_bytes and tokens else None
    known = measured if bytes_per_token is None else bytes_per_token
    samples: list[Sample] = []
    for engine in list_named(snapshot.page):
        n_bytes = known
        if known is None and model is not None and engine.kv_cache_dtype is not None:
            n_bytes = model(engine.kv_cache_dtype, gpus)
        labels, capacity_tokens = label_engine(engine), engine.kv_capacity_tokens
        each = count_tokens_per_request(engine)
        found = (
            (catalog.ENGINE_KV_TOKENS_USED, engine.kv_token_ratio),
            (
                catalog.ENGINE_KV_CAPACITY_BYTES,
                n_bytes and capacity_tokens and capacity_tokens * n_bytes,
            ),
            (catalog.ENGINE_KV_TOKENS_PER_REQUEST, each),
            (catalog.ENGINE_KV_BYTES_PER_REQUEST, n_bytes and each and each * n_bytes),
        )
        samples += [Sample(metric, labels, value) for metric, value in found if value is not None]
    return tuple(samples)


def count_tokens_per_request(engine: EngineReading) -> float | None:
    """Return the average tokens per running request; None while nothing runs or nothing is held."""
    if not engine.running or not engine.kv_used_ratio or engine.kv_capacity_tokens is None:
        return None
    tokens = engine.kv_used_ratio * engine.kv_capacity_tokens / engine.running
    return tokens if isfinite(tokens) else None


WINDOW_SECONDS: Final = 300.0
STEPS: Final = 60
"""Counts are kept a sixtieth of the window apart, which bounds memory at any sampling interval."""


class Count(Struct, frozen=True, kw_only=True):
    """The counters at one moment."""

    seconds: float
    queries: float
    hits: float


class PrefixCacheState(Struct, frozen=True, kw_only=True):
    """By (model_name, engine): the counts within the window and the last one before it, oldest first.

    An engine that left the page is dropped after a window.
    """

    engines: dict[tuple[str, str], tuple[Count, ...]] = field(default_factory=dict)


def derive_prefix_cache(
    state: PrefixCacheState, snapshot: Snapshot
) -> tuple[PrefixCacheState, tuple[Sample, ...]]:
    """Return hits over queries of the last 5 minutes per engine; absent without queries in that time.

    A counter that fell restarted from 0. vLLM V0 has no counters: there the ratio is the engine's lifetime average.
    """
    if snapshot.engine_status is not None and not snapshot.engine_status.in_service:
        return PrefixCacheState(), ()
    now, counts, samples = snapshot.monotonic_seconds, dict(state.engines), []
    present = {label_engine(engine): engine for engine in list_engines(snapshot.page)}
    for key, engine in present.items():
        queries, hits, kept = (
            engine.prefix_queries_total,
            engine.prefix_hits_total,
            counts.get(key, ()),
        )
        kept = kept[max(0, sum(now - each.seconds >= WINDOW_SECONDS for each in kept) - 1) :]
        if queries is not None and hits is not None:
            if kept and (queries < kept[-1].queries or hits < kept[-1].hits):
                kept = (Count(seconds=now, queries=0.0, hits=0.0),)
            elif len(kept) > 1 and kept[-1].seconds - kept[-2].seconds < WINDOW_SECONDS / STEPS:
                kept = kept[:-1]
            kept = (*kept, Count(seconds=now, queries=queries, hits=hits))
        ratio = engine.prefix_hit_lifetime_ratio
        if kept:
            counts[key] = kept
            asked, found = kept[-1].queries - kept[0].queries, kept[-1].hits - kept[0].hits
            ratio = min(1.0, found / asked) if asked > 0 else None
        if ratio is not None:
            samples.append(Sample(catalog.ENGINE_PREFIX_HIT_RATIO, key, ratio))
    following = {
        key: kept
        for key, kept in limit_remembered(counts, present).items()
        if key in present or now - kept[-1].seconds < WINDOW_SECONDS
    }
    return PrefixCacheState(engines=following), tuple(samples)


TIMES: Final = 3
"""Samples with requests waiting at the highest load before it counts as the limit: one queue proves nothing."""


class Batch(Struct, frozen=True, kw_only=True):
    """The most requests seen running, and how often others waited then although the KV cache had room for one more.

    `is_reported` is whether the limit was ever read: while it is not, it is unknown.
    """

    most: float = 0.0
    waited: int = 0
    is_reported: bool = False


class Batches(Struct, frozen=True, kw_only=True):
    """A batch per (model_name, engine), in one run of the engine."""

    restarts: int = 0
    engines: dict[tuple[str, str], Batch] = field(default_factory=dict)


def derive_admission(state: Batches, snapshot: Snapshot) -> tuple[Batches, tuple[Sample, ...]]:
    """Return how many more requests each engine can run, by its free KV cache and `max_num_seqs`.

    Without that setting, which vLLM's page does not show, the limit is the most that ever ran, once others waited
    beside it for something other than the KV cache. No sample while nothing runs or the engine does not serve: the
    gauges of a sleeping or stalled engine are frozen.
    """
    serves = snapshot.engine_status is None or snapshot.engine_status.state is EngineState.SERVING
    if snapshot.page is None or not serves:
        return state, ()
    if snapshot.engine_status is not None and snapshot.engine_status.restarts != state.restarts:
        state = Batches(restarts=snapshot.engine_status.restarts)
    batches, samples = {}, []
    for engine in list_named(snapshot.page):
        labels, running, used = label_engine(engine), engine.running or 0.0, engine.kv_used_ratio
        batch = state.engines.get(labels, Batch())
        is_reported = batch.is_reported or engine.max_num_seqs is not None
        if running > batch.most or is_reported != batch.is_reported:
            batch = Batch(most=running, is_reported=is_reported)
        fits = used is not None and running > 0 and used * (1 + 1 / running) <= 1
        if running == batch.most and engine.waiting and fits:
            batch = replace(batch, waited=min(TIMES, batch.waited + 1))
        batches[labels], more = batch, _count_more(engine, batch)
        if more is not None:
            samples.append(Sample(catalog.ENGINE_ADDITIONAL_REQUESTS, labels, more))
    return replace(state, engines=batches), tuple(samples)


def _count_more(engine: EngineReading, batch: Batch) -> float | None:
    if (
        not engine.running
        or not engine.kv_used_ratio
        or (batch.is_reported and engine.max_num_seqs is None)
    ):
        return None
    fitting = engine.running * (1.0 - engine.kv_used_ratio) / engine.kv_used_ratio
    fitting = float(floor(fitting)) if isfinite(fitting) else fitting
    limit = float(batch.most) if batch.waited >= TIMES else None
    limit = engine.max_num_seqs if batch.is_reported else limit
    return fitting if limit is None else min(fitting, max(0.0, limit - engine.running))
