"""The difference between the memory an engine reports and the memory it holds."""

from vllm_headroom import catalog
from vllm_headroom.derive.series import label_gpu
from vllm_headroom.model import EnginePage, Gpu, Sample, Snapshot


def derive_discrepancy(snapshot: Snapshot, *, configured_bytes: float | None) -> tuple[Sample, ...]:
    """Return the reported memory of each of the engine's GPUs and what it holds beyond.

    The difference is signed, in bytes and as a ratio. The report is the first available of: a
    metric in bytes on the engine's page; torch's reserved bytes, from the probe; the budget, which
    vLLM computes as gpu_memory_utilization times the device's total (vllm/v1/worker/utils.py)
    unless kv_cache_memory_bytes is set; `configured_bytes` per GPU. No sample without a report, or
    while the page or the device cannot be read.
    """
    samples: list[Sample] = []
    if snapshot.page is None:
        return ()
    for gpu in snapshot.owned_gpus:
        memory = gpu.reading.memory
        if memory is None:
            continue
        report = _find_reported(snapshot.page, gpu, memory.total_bytes, configured_bytes)
        if report is None:
            continue
        basis, reported_bytes = report
        labels = (*label_gpu(gpu), basis)
        samples.append(Sample(catalog.MEMORY_REPORTED, labels, reported_bytes))
        if gpu.held_bytes is None:
            continue
        excess_bytes = gpu.held_bytes - reported_bytes
        samples.append(Sample(catalog.MEMORY_DISCREPANCY, labels, excess_bytes))
        ratio = excess_bytes / reported_bytes
        samples.append(Sample(catalog.MEMORY_DISCREPANCY_RATIO, labels, ratio))
        # What the engine may still take of its budget is not unused.
        unused_bytes = max(0.0, memory.left_bytes + min(0.0, excess_bytes))
        samples.append(Sample(catalog.ENGINE_UNUSED, label_gpu(gpu), unused_bytes))
    return tuple(samples)


def _find_reported(
    page: EnginePage, gpu: Gpu, total_bytes: int, configured_bytes: float | None
) -> tuple[str, float] | None:
    """Return the basis and the bytes per GPU; None without a report, or when engines disagree."""
    measured_sizes = {engine.memory_bytes for engine in page.engines}
    if len(measured_sizes) == 1:
        measured_bytes = measured_sizes.pop()
        if measured_bytes:
            return "metric", measured_bytes
    if gpu.inside is not None and gpu.inside.reserved_bytes:
        return "probe", float(gpu.inside.reserved_bytes)
    budget_ratios = set[float]()
    for engine in page.engines:
        ratio = engine.gpu_memory_utilization_ratio
        # With the cache's size in bytes, the budget is not computed from the ratio.
        if ratio is not None and engine.kv_cache_memory_bytes is None:
            budget_ratios.add(ratio)
    if len(budget_ratios) == 1:
        budget_bytes = budget_ratios.pop() * total_bytes
        if budget_bytes:
            return "budget", budget_bytes
    if configured_bytes:
        return "configured", configured_bytes
    return None
