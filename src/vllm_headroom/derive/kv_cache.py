"""How big is the KV cache, and what does a request take of it?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import floor, isfinite
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.readings import engine_labels, engines, named, remembered, together
from vllm_headroom.model import (
    EnginePage,
    EngineReading,
    Failure,
    Inside,
    ProbedProcess,
    ProbeReadings,
    Sample,
    SchedulerReading,
    Snapshot,
)
from vllm_headroom.vocabulary import EngineState, MemoryPart

TokenBytes = Callable[[str, int | None], int | None]
"""What a token takes in the cache of one engine, by the cache's dtype and the number of its GPUs, None if unknown."""


def kv_cache(
    snapshot: Snapshot, *, bytes_per_token: float | None, model: TokenBytes | None = None
) -> tuple[Sample, ...]:
    """Return KV figures per engine; `bytes_per_token` counts one token on all GPUs of one engine together.

    vLLM tells no bytes per token: without it they are what the cache takes by the probe over the tokens it can hold, or
    `model` tells them from the cache's dtype on the page, and where that cannot be, there are tokens and no bytes. What
    is per running request is absent while nothing runs or nothing is held.
    """
    gpus, known = _gpus(snapshot), _measured(snapshot) if bytes_per_token is None else bytes_per_token
    return tuple(
        sample
        for engine in named(snapshot.page)
        for sample in _of_engine(engine, _known(engine, model, gpus) if known is None else known)
    )


def _gpus(snapshot: Snapshot) -> int | None:
    """Return the GPUs of one engine, at the most; None where they are not known."""
    ranks = {engine.engine for engine in engines(snapshot.page)}
    return -(-len(snapshot.owned) // max(1, len(ranks))) or None


def _measured(snapshot: Snapshot) -> float | None:
    """Return what all KV caches take over the tokens that all engines can hold; None where one of them is unknown.

    A cache that sleep has dropped is unknown, not free.
    """
    inside = [gpu.inside or Inside() for gpu in snapshot.owned]
    held_bytes = together(dict(each.parts).get(MemoryPart.KV_CACHE) for each in inside)
    tokens = together(engine.kv_capacity_tokens for engine in named(snapshot.page))
    return held_bytes / tokens if held_bytes and tokens else None


def _known(engine: EngineReading, model: TokenBytes | None, gpus: int | None) -> int | None:
    if model is None or engine.kv_cache_dtype is None:
        return None
    return model(engine.kv_cache_dtype, gpus)


def tokens_per_request(engine: EngineReading) -> float | None:
    """Return what a running request holds on average; None while nothing runs or nothing is held."""
    if not engine.running or not engine.kv_used_ratio or engine.kv_capacity_tokens is None:
        return None
    tokens = engine.kv_used_ratio * engine.kv_capacity_tokens / engine.running
    return tokens if isfinite(tokens) else None


def _of_engine(engine: EngineReading, bytes_per_token: float | None) -> Iterator[Sample]:
    labels, capacity_tokens = engine_labels(engine), engine.kv_capacity_tokens
    if capacity_tokens is not None and bytes_per_token is not None:
        yield Sample(catalog.ENGINE_KV_CAPACITY_BYTES, labels, capacity_tokens * bytes_per_token)
    tokens = tokens_per_request(engine)
    if tokens is None:
        return
    yield Sample(catalog.ENGINE_KV_TOKENS_PER_REQUEST, labels, tokens)
    if bytes_per_token is not None:
        yield Sample(catalog.ENGINE_KV_BYTES_PER_REQUEST, labels, tokens * bytes_per_token)


WINDOW_SECONDS: Final = 300.0
STEPS: Final = 60
"""Counts are kept a sixtieth of the window apart, so that the memory is bounded at any sampling interval."""


class Count(Struct, frozen=True, kw_only=True):
    """The counters at one moment."""

    seconds: float
    queries: float
    hits: float


Counts = tuple[Count, ...]
"""Those of the window and the one before it, oldest first."""


class PrefixCacheState(Struct, frozen=True, kw_only=True):
    """Counts per (model_name, engine); one that left the page is forgotten after a window, at once among many."""

    engines: dict[tuple[str, str], Counts] = field(default_factory=dict)


def prefix_cache(state: PrefixCacheState, snapshot: Snapshot) -> tuple[PrefixCacheState, tuple[Sample, ...]]:
    """Return hits over queries of the last 5 minutes per engine; absent without queries in that time.

    A counter that fell began again from 0: the engine restarted, and what its last life counted ended with it. vLLM V0
    has no counters: there the ratio is the engine's own, over its lifetime.
    """
    if snapshot.life is not None and not snapshot.life.in_service:
        return PrefixCacheState(), ()
    now = snapshot.monotonic_seconds
    counts = {key: _aged(old, now) for key, old in state.engines.items()}
    present = {engine_labels(engine): engine for engine in engines(snapshot.page)}
    for key, engine in present.items():
        queries, hits = engine.prefix_queries_total, engine.prefix_hits_total
        if queries is not None and hits is not None:
            counts[key] = _counted(counts.get(key, ()), Count(seconds=now, queries=queries, hits=hits))
    following = {
        key: kept
        for key, kept in remembered(counts, present).items()
        if key in present or now - kept[-1].seconds < WINDOW_SECONDS
    }
    samples = tuple(sample for key, engine in present.items() for sample in _ratio(engine, counts.get(key)))
    return PrefixCacheState(engines=following), samples


def _aged(counts: Counts, now: float) -> Counts:
    older = sum(now - each.seconds >= WINDOW_SECONDS for each in counts)
    return counts[max(0, older - 1) :]


def _counted(counts: Counts, count: Count) -> Counts:
    if counts and (count.queries < counts[-1].queries or count.hits < counts[-1].hits):
        counts = (Count(seconds=count.seconds, queries=0.0, hits=0.0),)
    elif len(counts) > 1 and counts[-1].seconds - counts[-2].seconds < WINDOW_SECONDS / STEPS:
        counts = counts[:-1]
    return (*counts, count)


def _ratio(engine: EngineReading, counts: Counts | None) -> Iterator[Sample]:
    ratio = engine.prefix_hit_lifetime_ratio
    if counts is not None:
        queries, hits = counts[-1].queries - counts[0].queries, counts[-1].hits - counts[0].hits
        ratio = min(1.0, hits / queries) if queries > 0 else None
    if ratio is not None:
        yield Sample(catalog.ENGINE_PREFIX_HIT_RATIO, engine_labels(engine), ratio)


def schedulers(page: EnginePage, processes: tuple[ProbedProcess, ...]) -> dict[tuple[str, str], SchedulerReading]:
    """Return the scheduler of each engine of the page, by its labels.

    An engine is its data-parallel rank; one engine and one scheduler belong together whatever they are called.
    """
    cores = [(each.data_parallel_rank, each.scheduler) for each in processes if each.scheduler is not None]
    engines = named(page)
    if len(engines) == len(cores) == 1:
        return {engine_labels(engines[0]): cores[0][1]}
    by_rank = {str(rank): scheduler for rank, scheduler in cores if rank is not None}
    return {engine_labels(engine): by_rank[engine.engine] for engine in engines if engine.engine in by_rank}


def with_steps(page: EnginePage | Failure, probe: ProbeReadings | Failure | None) -> EnginePage | Failure:
    """Return the page with the steps that each engine's core has done; of a core that fell silent, its last word."""
    if isinstance(page, Failure) or not isinstance(probe, ProbeReadings):
        return page
    known = schedulers(page, probe.present + probe.silent)
    return replace(page, engines=tuple(_stepped(engine, known.get(engine_labels(engine))) for engine in page.engines))


def _stepped(engine: EngineReading, scheduler: SchedulerReading | None) -> EngineReading:
    if scheduler is None or scheduler.steps_total is None:
        return engine
    return replace(engine, steps_total=float(scheduler.steps_total))


TIMES: Final = 3
"""How often others must have waited beside the most that ever ran: a queue of one moment says nothing of a limit."""


class Batch(Struct, frozen=True, kw_only=True):
    """The most requests seen running, and how often others waited then though the KV cache had room for one more."""

    most: float = 0.0
    waited: int = 0


class Batches(Struct, frozen=True, kw_only=True):
    """A batch per (model_name, engine), in one life of the engine."""

    restarts: int = 0
    engines: dict[tuple[str, str], Batch] = field(default_factory=dict)


def admission(state: Batches, snapshot: Snapshot) -> tuple[Batches, tuple[Sample, ...]]:
    """Return how many more requests each engine could run: as many as fit its KV cache and `max_num_seqs` admits.

    vLLM tells that setting nowhere on its page: where the probe does not either, and the most that ever ran stays the
    most while others wait for anything but the KV cache, it is the limit. There is no sample while nothing runs, nor
    while the engine does not serve: what its page shows asleep, or stalled, is frozen.
    """
    serves = snapshot.life is None or snapshot.life.state is EngineState.SERVING
    if snapshot.page is None or not serves:
        return state, ()
    state = _followed(state, snapshot)
    present = snapshot.probe.present if isinstance(snapshot.probe, ProbeReadings) else ()
    told = schedulers(snapshot.page, present)
    return state, tuple(
        Sample(catalog.ENGINE_ADDITIONAL_REQUESTS, labels, more)
        for engine in named(snapshot.page)
        if (more := _more(engine, state.engines[labels := engine_labels(engine)], told.get(labels))) is not None
    )


def _followed(state: Batches, snapshot: Snapshot) -> Batches:
    if snapshot.life is not None and snapshot.life.restarts != state.restarts:
        state = Batches(restarts=snapshot.life.restarts)
    seen = {engine_labels(each): each for each in named(snapshot.page)}
    return replace(state, engines={labels: _of(state.engines.get(labels, Batch()), seen[labels]) for labels in seen})


def _of(batch: Batch, engine: EngineReading) -> Batch:
    running, used = engine.running or 0.0, engine.kv_used_ratio
    if running > batch.most:
        batch = Batch(most=running)
    fits = used is not None and running > 0 and used * (1 + 1 / running) <= 1
    limited = running == batch.most and bool(engine.waiting) and fits
    return replace(batch, waited=min(TIMES, batch.waited + 1)) if limited else batch


def _more(engine: EngineReading, batch: Batch, told: SchedulerReading | None) -> float | None:
    if not engine.running or not engine.kv_used_ratio:
        return None
    fitting = engine.running * (1.0 - engine.kv_used_ratio) / engine.kv_used_ratio
    fitting = float(floor(fitting)) if isfinite(fitting) else fitting
    limit = _limit(batch, told)
    return fitting if limit is None else min(fitting, max(0.0, limit - engine.running))


def _limit(batch: Batch, told: SchedulerReading | None) -> float | None:
    if told is not None and told.max_num_seqs is not None:
        return told.max_num_seqs
    return batch.most if batch.waited >= TIMES else None
