"""The difference between the memory an engine reports and the memory it holds."""

from vllm_headroom import catalog
from vllm_headroom.derive.readings import label_gpu, list_engines
from vllm_headroom.model import EnginePage, Gpu, Sample, Snapshot


def derive_discrepancy(snapshot: Snapshot, *, configured_bytes: float | None) -> tuple[Sample, ...]:
    """Return, per GPU of the engine, the reported memory and what it holds beyond (signed; bytes and ratio).

    The report is the first available of: a metric in bytes on the engine's page; torch's reserved bytes, from the
    probe; the budget, which vLLM computes as gpu_memory_utilization times the device's total (vllm/v1/worker/utils.py)
    unless kv_cache_memory_bytes is set; `configured_bytes` per GPU. No sample without a report, or while the page or
    the device cannot be read.
    """
    page, samples = snapshot.page, list[Sample]()
    for gpu in snapshot.owned_gpus if page is not None else ():
        memory = gpu.reading.memory
        report = (
            None
            if memory is None
            else _find_reported(page, gpu, memory.total_bytes, configured_bytes)
        )
        if memory is None or report is None:
            continue
        basis, reported_bytes = report
        labels = (*label_gpu(gpu), basis)
        samples.append(Sample(catalog.MEMORY_REPORTED, labels, reported_bytes))
        if gpu.held_bytes is not None:
            difference = gpu.held_bytes - reported_bytes
            unused_bytes = max(0.0, memory.left_bytes + min(0.0, difference))
            samples += (
                Sample(catalog.MEMORY_DISCREPANCY, labels, difference),
                Sample(catalog.MEMORY_DISCREPANCY_RATIO, labels, difference / reported_bytes),
                Sample(catalog.ENGINE_UNUSED, label_gpu(gpu), unused_bytes),
            )
    return tuple(samples)


def _find_reported(
    page: EnginePage | None, gpu: Gpu, total_bytes: int, configured_bytes: float | None
) -> tuple[str, float] | None:
    """Return the basis and the bytes per GPU; None when engines disagree."""
    engines = list_engines(page)
    measured = {engine.memory_bytes for engine in engines}
    if len(measured) == 1 and (value := measured.pop()):
        return "metric", value
    if gpu.inside is not None and gpu.inside.reserved_bytes:
        return "probe", float(gpu.inside.reserved_bytes)
    budgets = {
        engine.gpu_memory_utilization_ratio
        for engine in engines
        if engine.kv_cache_memory_bytes is None
    } - {None}
    if len(budgets) == 1 and (budget_bytes := (budgets.pop() or 0.0) * total_bytes):
        return "budget", budget_bytes
    return ("configured", configured_bytes) if configured_bytes else None
