"""The hit ratio of the prefix cache."""

from typing import Final

from msgspec import Struct, field

from vllm_headroom import catalog
from vllm_headroom.derive.pages import list_engines
from vllm_headroom.derive.series import label_engine, limit_remembered
from vllm_headroom.model import EngineReading, Sample, Snapshot

RATIO_WINDOW_SECONDS: Final = 300.0
"""The time over which the hit ratio is measured."""

RATIO_WINDOW_STEPS: Final = 60
"""The maximum number of counts in the window. The maximum limits the memory used at short sampling
intervals.
"""


class Count(Struct, frozen=True, kw_only=True):
    """The counters at one point in time."""

    seconds: float
    queries: float
    hits: float


class PrefixCacheState(Struct, frozen=True, kw_only=True):
    """The counts of each engine within the window, and the last count before the window.

    The oldest count comes first. An engine that is missing from the page for a whole window is
    dropped.
    """

    engines: dict[tuple[str, str], tuple[Count, ...]] = field(default_factory=dict)
    """The counts of each engine, by the labels `model_name` and `engine`."""


def derive_prefix_cache(
    state: PrefixCacheState, snapshot: Snapshot
) -> tuple[PrefixCacheState, tuple[Sample, ...]]:
    """Return, for each engine, hits divided by queries over the last five minutes.

    An engine that received no queries in that time has no sample. For vLLM V0, the sample is the
    average since the engine started. V0 exports no counters.
    """
    # Counts from an ended run are not compared with those from the next run.
    if snapshot.engine_status is not None and not snapshot.engine_status.is_in_service:
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
    # If an engine is briefly missing from the page, its counts are kept.
    recent_counts = {
        labels: counts
        for labels, counts in limit_remembered(counts_by_engine, engines).items()
        if labels in engines or now - counts[-1].seconds < RATIO_WINDOW_SECONDS
    }
    return PrefixCacheState(engines=recent_counts), tuple(samples)


def _update_counts(
    counts: tuple[Count, ...], engine: EngineReading, now: float
) -> tuple[Count, ...]:
    """Return the counts in the window that ends at `now`, with the newest added.

    If the page has no counters, nothing is added. If a counter fell, it was reset to 0, so the
    counts start over.
    """
    old_counts = [count for count in counts if now - count.seconds >= RATIO_WINDOW_SECONDS]
    # The last count before the window marks the start of the window.
    counts = counts[max(0, len(old_counts) - 1) :]
    queries = engine.prefix_queries_total
    hits = engine.prefix_hits_total
    if queries is None or hits is None:
        return counts
    if counts and (queries < counts[-1].queries or hits < counts[-1].hits):
        counts = (Count(seconds=now, queries=0.0, hits=0.0),)
    elif (
        len(counts) > 1
        and counts[-1].seconds - counts[-2].seconds < RATIO_WINDOW_SECONDS / RATIO_WINDOW_STEPS
    ):
        # The newest stored count is too close to the previous one. The new count replaces it.
        counts = counts[:-1]
    return (*counts, Count(seconds=now, queries=queries, hits=hits))


def _measure_hit_ratio(counts: tuple[Count, ...]) -> float | None:
    """Return hits divided by queries over these counts, or None without queries."""
    queries = counts[-1].queries - counts[0].queries
    hits = counts[-1].hits - counts[0].hits
    if queries <= 0:
        return None
    return min(1.0, hits / queries)
