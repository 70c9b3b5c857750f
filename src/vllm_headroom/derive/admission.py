"""How many requests does the engine let run at once?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from vllm_headroom import catalog
from vllm_headroom.derive.inside.schedulers import schedulers
from vllm_headroom.derive.page_facts import named
from vllm_headroom.derive.readings import engine_labels
from vllm_headroom.model import EngineReading, Failure, ProbeReadings, Sample, Snapshot

TIMES: Final = 3
"""How often others must have waited beside the most that ever ran: a queue of one moment says nothing of a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The most requests seen running, and how often others waited then though the KV cache had room for one more."""

    most: float = 0.0
    waited: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """A batch per (model_name, engine), in one life of the engine."""

    restarts: int = 0
    engines: dict[tuple[str, str], Batch] = field(default_factory=dict)


def within_batch(
    question: Callable[[Snapshot], tuple[Sample, ...]],
) -> Callable[[Batches, Snapshot], tuple[Batches, tuple[Sample, ...]]]:
    """Return the question as a step whose additional requests never exceed what `max_num_seqs` admits.

    vLLM tells that setting nowhere on its page: where the probe does not either, and the most that ever ran stays the
    most while others wait for anything but the KV cache, it is the limit.
    """

    def step(state: Batches, snapshot: Snapshot) -> tuple[Batches, tuple[Sample, ...]]:
        state = _followed(state, snapshot)
        room = _room(state, snapshot)
        return state, tuple(_capped(sample, room) for sample in question(snapshot))

    return step


def _followed(state: Batches, snapshot: Snapshot) -> Batches:
    if snapshot.life is not None and snapshot.life.restarts != state.restarts:
        state = Batches(restarts=snapshot.life.restarts)
    if isinstance(snapshot.engines, Failure):
        return state
    seen = {engine_labels(engine): engine for engine in named(snapshot.engines)}
    return replace(
        state, engines={labels: _of(state.engines.get(labels, Batch()), engine) for labels, engine in seen.items()}
    )


def _of(batch: Batch, engine: EngineReading) -> Batch:
    running, used = engine.running or 0.0, engine.kv_used_ratio
    if running > batch.most:
        batch = Batch(most=running)
    fits = used is not None and running > 0 and used * (1 + 1 / running) <= 1
    limited = running == batch.most and bool(engine.waiting) and fits
    return replace(batch, waited=min(TIMES, batch.waited + 1)) if limited else batch


def _room(state: Batches, snapshot: Snapshot) -> dict[tuple[str, ...], float]:
    """Return how many more may run, for each engine whose limit is known."""
    if isinstance(snapshot.engines, Failure):
        return {}
    present = snapshot.probe.present if isinstance(snapshot.probe, ProbeReadings) else ()
    told = {labels: each.max_num_seqs for labels, each in schedulers(snapshot.engines, present).items()}
    limits = {
        engine_labels(engine): (_limit(state.engines[engine_labels(engine)], told.get(engine_labels(engine))), engine)
        for engine in named(snapshot.engines)
    }
    return {
        labels: max(0.0, limit - (engine.running or 0.0))
        for labels, (limit, engine) in limits.items()
        if limit is not None
    }


def _limit(batch: Batch, told: int | None) -> float | None:
    if told is not None:
        return float(told)
    return batch.most if batch.waited >= TIMES else None


def _capped(sample: Sample, room: dict[tuple[str, ...], float]) -> Sample:
    if sample.metric is not catalog.ENGINE_ADDITIONAL_REQUESTS or sample.labels not in room:
        return sample
    return sample._replace(value=min(sample.value, room[sample.labels]))
