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
"""The highest load counts as the engine's limit only after this many samples in which requests
waited at that load. One queue proves nothing.
"""


class BatchEvidence(Struct, frozen=True, kw_only=True):
    """The evidence of how many requests one engine can run at once (the batch limit)."""

    most_running: float = 0.0
    """The highest number of running requests so far."""

    waited_samples: int = 0
    """In how many samples requests waited at the highest load although the KV cache had room for
    one more.
    """

    is_reported: bool = False
    """Whether the engine ever reported its limit. If so, the limit is unknown while the engine does
    not report it, and is never estimated.
    """


class Batches(Struct, frozen=True, kw_only=True):
    """The evidence of each engine in one run."""

    restarts: int = 0
    """Identifies the run by its number of restarts."""
    engines: dict[tuple[str, str], BatchEvidence] = field(default_factory=dict)
    """The evidence of each engine, by the labels `model_name` and `engine`."""


def derive_admission(state: Batches, snapshot: Snapshot) -> tuple[Batches, tuple[Sample, ...]]:
    """Return how many more requests each engine can run, by its KV cache and `max_num_seqs`.

    vLLM's page does not show `max_num_seqs`. If the setting is unknown, the limit is the highest
    number of running requests so far. It counts only if other requests waited at that load although
    the KV cache had room. While nothing runs, or while the engine does not serve, there is no
    sample, because the gauges of a sleeping or stalled engine do not change.
    """
    status = snapshot.engine_status
    if snapshot.page is None:
        return state, ()
    if status is not None and status.state is not EngineState.SERVING:
        return state, ()
    # Another run may have been started with another limit.
    if status is not None and status.restarts != state.restarts:
        state = Batches(restarts=status.restarts)
    batches = {}
    samples = []
    for engine in list_named(snapshot.page):
        labels = label_engine(engine)
        batch = _update_batch(state.engines.get(labels, BatchEvidence()), engine)
        batches[labels] = batch
        additional_requests = _count_additional(engine, batch)
        if additional_requests is not None:
            samples.append(Sample(catalog.ENGINE_ADDITIONAL_REQUESTS, labels, additional_requests))
    return replace(state, engines=batches), tuple(samples)


def _update_batch(batch: BatchEvidence, engine: EngineReading) -> BatchEvidence:
    """Return the evidence of an engine's limit with this reading added."""
    running = engine.running or 0.0
    is_reported = batch.is_reported or engine.max_num_seqs is not None
    # The limit is at least the new highest load, so queues at lower loads are no longer evidence.
    if running > batch.most_running or is_reported != batch.is_reported:
        batch = BatchEvidence(most_running=running, is_reported=is_reported)
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


def _count_additional(engine: EngineReading, batch: BatchEvidence) -> float | None:
    """Return how many more requests of the average size can run; None if that is unknown."""
    if not engine.running or not engine.kv_used_ratio:
        return None
    limit = None
    if batch.is_reported:
        limit = engine.max_num_seqs
        # The engine reported its limit before, and does not report it now. The highest load must
        # not replace the reported limit.
        if limit is None:
            return None
    elif batch.waited_samples >= FULL_BATCH_SAMPLES:
        limit = batch.most_running
    # The running requests take the used share of the cache, so the free share has room for
    # proportionally many more.
    fitting = engine.running * (1.0 - engine.kv_used_ratio) / engine.kv_used_ratio
    # If the used share is tiny, the quotient is infinite.
    if isfinite(fitting):
        fitting = float(floor(fitting))
    if limit is None:
        return fitting
    return min(fitting, max(0.0, limit - engine.running))
