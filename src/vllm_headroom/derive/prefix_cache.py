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
