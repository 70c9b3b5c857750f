"""How many more requests each engine can run."""

from math import floor, isfinite
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.pages import list_named
from vllm_headroom.derive.series import label_engine
from vllm_headroom.model import EngineReading, Sample, Snapshot
from vllm_headroom.vocabulary import EngineState

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
    # A load higher than any before has proved that the limit is not lower: count from here.
    if running > batch.most_running or is_reported != batch.is_reported:
        batch = Batch(most_running=running, is_reported=is_reported)
    has_queue_at_limit = running == batch.most_running and bool(engine.waiting)
    # Requests that wait for the KV cache are no evidence of the limit.
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
        # It was readable before, and is unknown now.
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
