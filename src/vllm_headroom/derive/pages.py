"""What a server's metrics page shows, taken over all its engines."""

from vllm_headroom.derive.sums import sum_known
from vllm_headroom.model import EnginePage, EngineReading


def list_engines(page: EnginePage | None) -> tuple[EngineReading, ...]:
    """Return the engines of the page, or () if the page could not be read."""
    return () if page is None else page.engines


def list_named(page: EnginePage | None) -> tuple[EngineReading, ...]:
    """Return the engines on the page that have a model name.

    vLLM V0 exports its settings without a model name until its first request.
    """
    return tuple(engine for engine in list_engines(page) if engine.model_name)


def count_running(page: EnginePage | None) -> float | None:
    """Return how many requests all engines run in total, or None if unknown.

    The result is also None if there are no engines. A sleeping engine is assumed to run no
    requests, because its gauges do not change.
    """
    counts: list[float | None] = []
    for engine in list_named(page):
        is_asleep = engine.awake is False
        counts.append(0.0 if is_asleep and engine.running else engine.running)
    return sum_known(counts)


def count_finished(page: EnginePage | None) -> float | None:
    """Return how many requests all engines have finished, or None if unknown."""
    return sum_known(engine.finished_total for engine in list_named(page))


def is_page_awake(page: EnginePage | None) -> bool | None:
    """Return whether all engines of the page are awake, or None if unknown."""
    reports = [engine.awake for engine in list_engines(page) if engine.awake is not None]
    return all(reports) if reports else None


def find_highest_kv_use(page: EnginePage | None) -> float | None:
    """Return the used share of the page's fullest KV cache, or None if unknown.

    Sleeping engines are omitted, because they have no cache and their gauges do not change.
    """
    used_ratios = [
        engine.kv_used_ratio
        for engine in list_named(page)
        if engine.kv_used_ratio is not None and engine.awake is not False
    ]
    return max(used_ratios, default=None)
