"""Compare the log's figures with those of the probe and the metrics page."""

from collections.abc import Iterator
from typing import Final

from vllm_headroom.model import LogReading, ProbeReadings, Snapshot, WorkerMeasurements
from vllm_headroom.model.start import EngineStart
from vllm_headroom.units import MIB, format_size

TOLERANCE_BYTES: Final = 64 * MIB
"""A smaller difference is ignored, because vLLM rounds to 0.01 GiB. This value is our choice."""

TOLERANCE_SHARE: Final = 0.02
"""A difference below this share of the larger size is also ignored. This value is our choice."""

TOLERANCE_RATIO: Final = 0.005
"""Half of 0.01, because ratios in vLLM's options usually have two decimal places."""


def find_disagreements(snapshot: Snapshot) -> tuple[str, ...]:
    """Return a sentence for each figure in the log that another source contradicts.

    The figures are those of the engine's newest start. The result is empty if there is no log, or
    until the engine has served after that start. Weights and KV cache are compared with the probe's
    figures. The budget is compared with the page's. For the KV cache, the log gives only an upper
    bound. An option can make vLLM use fewer blocks.
    """
    if not isinstance(snapshot.log, LogReading) or not snapshot.is_in_service:
        return ()
    start = snapshot.log.start
    if start is None or not start.has_served:
        return ()
    return (*_compare_with_probe(start, snapshot), *_compare_budget(start, snapshot))


def _compare_with_probe(start: EngineStart, snapshot: Snapshot) -> Iterator[str]:
    """Yield a sentence for each size on which the log and the probe's files differ."""
    if not isinstance(snapshot.probe, ProbeReadings):
        return
    parts = [process.parts for process in snapshot.probe.present if process.parts is not None]
    log_weights_bytes = start.find_largest("weights_bytes")
    probe_weights_bytes = max(_list_sizes(parts, "weights_bytes"), default=None)
    if log_weights_bytes is not None and probe_weights_bytes is not None:
        difference_bytes = abs(log_weights_bytes - probe_weights_bytes)
        if difference_bytes > _tolerate(probe_weights_bytes):
            yield _describe("weights", log_weights_bytes, probe_weights_bytes)
    log_cache_bytes = start.find_largest("kv_cache_bytes")
    probe_cache_bytes = max(_list_sizes(parts, "kv_cache_bytes"), default=None)
    if log_cache_bytes is not None and probe_cache_bytes is not None:
        difference_bytes = probe_cache_bytes - log_cache_bytes
        if difference_bytes > _tolerate(probe_cache_bytes):
            yield _describe("KV cache", log_cache_bytes, probe_cache_bytes)


def _list_sizes(parts: list[WorkerMeasurements], name: str) -> Iterator[int]:
    """Yield the known sizes of a part, except those of a possibly sleeping engine."""
    for process_parts in parts:
        n_bytes = getattr(process_parts, name)
        if n_bytes is not None and process_parts.pool is None and not process_parts.asleep:
            yield n_bytes


def _tolerate(size_bytes: float) -> float:
    return max(TOLERANCE_BYTES, TOLERANCE_SHARE * size_bytes)


def _describe(part: str, log_bytes: float, probe_bytes: float) -> str:
    return f"{part}: {format_size(log_bytes)} by the log, {format_size(probe_bytes)} by the probe"


def _compare_budget(start: EngineStart, snapshot: Snapshot) -> Iterator[str]:
    """Yield a sentence if no engine on the page has the log's memory share."""
    if snapshot.page is None:
        return
    log_ratio = start.find_option("gpu_memory_utilization")
    page_ratios = {
        engine.gpu_memory_utilization_ratio
        for engine in snapshot.page.engines
        if engine.gpu_memory_utilization_ratio is not None
    }
    if not isinstance(log_ratio, float) or not page_ratios:
        return
    if all(abs(log_ratio - page_ratio) > TOLERANCE_RATIO for page_ratio in page_ratios):
        page_ratio = min(page_ratios)
        yield f"--gpu-memory-utilization: {log_ratio:g} by the log, {page_ratio:g} by the page"
