"""Is the prefix cache paying?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec import Struct, field

from vllm_headroom import catalog
from vllm_headroom.derive.page_facts import engines
from vllm_headroom.derive.readings import engine_labels, remembered
from vllm_headroom.model import EngineReading, Sample, Snapshot

WINDOW_SECONDS: Final = 300.0
STEPS: Final = 60
"""Counts are kept in steps of a sixtieth of the window, so that the memory is bounded at any sampling interval."""


class Bucket(Struct, frozen=True, kw_only=True):
    """Queries and hits counted from `began_seconds` on, for one sixtieth of the window."""

    began_seconds: float
    queries: float
    hits: float


class EngineCounts(Struct, frozen=True, kw_only=True):
    """The counters as last seen and their increases by step, oldest first."""

    queries_total: float
    hits_total: float
    steps: tuple[Bucket, ...] = ()


class PrefixCacheState(Struct, frozen=True, kw_only=True):
    """Counts per (model_name, engine); one that left the page is forgotten after a window, at once among many."""

    engines: dict[tuple[str, str], EngineCounts] = field(default_factory=dict)


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
        if engine.prefix_queries_total is not None and engine.prefix_hits_total is not None:
            counts[key] = _counted(counts.get(key), engine.prefix_queries_total, engine.prefix_hits_total, now)
    following = {key: kept for key, kept in remembered(counts, present).items() if key in present or kept.steps}
    samples = tuple(sample for key, engine in present.items() for sample in _ratio(engine, counts.get(key)))
    return PrefixCacheState(engines=following), samples


def _aged(counts: EngineCounts, now: float) -> EngineCounts:
    steps = tuple(step for step in counts.steps if now - step.began_seconds < WINDOW_SECONDS)
    return EngineCounts(queries_total=counts.queries_total, hits_total=counts.hits_total, steps=steps)


def _counted(before: EngineCounts | None, queries_total: float, hits_total: float, now: float) -> EngineCounts:
    steps = () if before is None else before.steps
    if before is None:
        queries, hits = 0.0, 0.0
    elif queries_total < before.queries_total or hits_total < before.hits_total:
        steps, queries, hits = (), queries_total, hits_total
    else:
        queries, hits = queries_total - before.queries_total, hits_total - before.hits_total
    step = Bucket(began_seconds=now, queries=queries, hits=hits)
    if steps and now - steps[-1].began_seconds < WINDOW_SECONDS / STEPS:
        *rest, last = steps
        steps = tuple(rest)
        step = Bucket(began_seconds=last.began_seconds, queries=last.queries + queries, hits=last.hits + hits)
    return EngineCounts(queries_total=queries_total, hits_total=hits_total, steps=(*steps, step))


def _ratio(engine: EngineReading, counts: EngineCounts | None) -> Iterator[Sample]:
    ratio = engine.prefix_hit_lifetime_ratio
    if counts is not None:
        queries, hits = sum(step.queries for step in counts.steps), sum(step.hits for step in counts.steps)
        ratio = min(1.0, hits / queries) if queries > 0 else None
    if ratio is not None:
        yield Sample(catalog.ENGINE_PREFIX_HIT_RATIO, engine_labels(engine), ratio)
