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
"""Evidence of a limit is a queue at the highest number of running requests. After this many samples
with such a queue, that number is the limit. A queue in a single sample proves nothing.
"""


class BatchEvidence(Struct, frozen=True, kw_only=True):
    """Evidence of the batch limit: how many requests one engine can run at once."""

    most_running: float = 0.0
    """The highest number of running requests so far."""

    waited_samples: int = 0
    """How many samples showed a queue at the highest load. The KV cache must have had room for one
    more request.
    """

    is_reported: bool = False
    """Whether the engine has ever reported its limit. If it has, the limit is never estimated. The
    limit is unknown whenever the engine stops reporting it.
    """


class Batches(Struct, frozen=True, kw_only=True):
    """The evidence for each engine within one run."""

    restarts: int = 0
    """The number of the engine's restarts so far, which identifies the run."""
    engines: dict[tuple[str, str], BatchEvidence] = field(default_factory=dict)
    """The evidence for each engine, by the labels `model_name` and `engine`."""


def derive_admission(state: Batches, snapshot: Snapshot) -> tuple[Batches, tuple[Sample, ...]]:
    """Return how many more requests each engine can run, given its KV cache and `max_num_seqs`.

    vLLM's metrics page does not expose `max_num_seqs`. An unknown setting is replaced by the
    highest number of running requests so far. For this, requests must have waited there although
    the KV cache had room. There is no sample while no request is running or the engine is not
    serving. The gauges of a sleeping or stalled engine do not change.
    """
    status = snapshot.engine_status
    if snapshot.page is None:
        return state, ()
    if status is not None and status.state is not EngineState.SERVING:
        return state, ()
    # The new run may have been started with a different limit.
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
    """Return the evidence for an engine's limit, updated with this reading."""
    running = engine.running or 0.0
    is_reported = batch.is_reported or engine.max_num_seqs is not None
    # The engine can run at least this many requests. Queues at lower loads are therefore no
    # evidence of a limit.
    if running > batch.most_running or is_reported != batch.is_reported:
        batch = BatchEvidence(most_running=running, is_reported=is_reported)
    has_queue_at_limit = running == batch.most_running and bool(engine.waiting)
    # Requests that wait for the KV cache are not evidence of the limit.
    if has_queue_at_limit and _fits_one_more(engine):
        waited_samples = min(FULL_BATCH_SAMPLES, batch.waited_samples + 1)
        batch = replace(batch, waited_samples=waited_samples)
    return batch


def _fits_one_more(engine: EngineReading) -> bool:
    """Return whether the KV cache has room for one more request of average size."""
    if not engine.running or engine.kv_used_ratio is None:
        return False
    return engine.running > 0 and engine.kv_used_ratio * (1 + 1 / engine.running) <= 1


def _count_additional(engine: EngineReading, batch: BatchEvidence) -> float | None:
    """Return how many more requests of average size can run, or None if unknown."""
    if not engine.running or not engine.kv_used_ratio:
        return None
    limit = None
    if batch.is_reported:
        limit = engine.max_num_seqs
        # The engine has reported its limit before but does not report it now. The highest number of
        # running requests must not replace the reported limit.
        if limit is None:
            return None
    elif batch.waited_samples >= FULL_BATCH_SAMPLES:
        limit = batch.most_running
    # The running requests occupy the used share of the cache. The free share has room for
    # proportionally many more.
    fitting = engine.running * (1.0 - engine.kv_used_ratio) / engine.kv_used_ratio
    # If the used share is tiny, the division yields infinity.
    if isfinite(fitting):
        fitting = float(floor(fitting))
    if limit is None:
        return fitting
    return min(fitting, max(0.0, limit - engine.running))
