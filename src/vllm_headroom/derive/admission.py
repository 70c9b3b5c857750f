"""How many more requests could the engine run at once?"""

from __future__ import annotations

from math import floor, isfinite
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.inside.schedulers import schedulers
from vllm_headroom.derive.page_facts import named
from vllm_headroom.derive.readings import engine_labels
from vllm_headroom.model import EngineReading, ProbeReadings, Sample, SchedulerReading, Snapshot
from vllm_headroom.vocabulary import EngineState

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
