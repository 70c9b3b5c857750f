"""The difference between the memory an engine reports and the memory it holds."""

from vllm_headroom import catalog
from vllm_headroom.derive.series import label_gpu
from vllm_headroom.model import EnginePage, Gpu, Sample, Snapshot


def derive_discrepancy(snapshot: Snapshot, *, configured_bytes: float | None) -> tuple[Sample, ...]:
    """Return the memory reported on each GPU, and how much more is held.

    The difference is negative if the engine holds less than it reports. The reported memory is the
    first of these that is known:

    - a metric in bytes on the engine's page;
    - torch's reserved bytes, from the probe;
    - the budget: gpu_memory_utilization times the device's total memory (vllm/v1/worker/utils.py),
      unless kv_cache_memory_bytes is set;
    - `configured_bytes` per GPU.

    There is no sample if none of these is known, or while the page or the device cannot be read.
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
        # Memory that the engine may still take within its budget is not unused.
        unused_bytes = max(0.0, memory.left_bytes + min(0.0, excess_bytes))
        samples.append(Sample(catalog.ENGINE_UNUSED, label_gpu(gpu), unused_bytes))
    return tuple(samples)


def _find_reported(
    page: EnginePage, gpu: Gpu, total_bytes: int, configured_bytes: float | None
) -> tuple[str, float] | None:
    """Return the reported bytes on a GPU and their basis.

    Returns None if there is no basis. A basis is skipped if it gives 0 bytes, or if the page's
    engines disagree.
    """
    # If engines disagree, it is unknown which of their figures is for this GPU.
    measured_sizes = {engine.memory_bytes for engine in page.engines}
    if len(measured_sizes) == 1:
        measured_bytes = measured_sizes.pop()
        if measured_bytes:
            return "metric", measured_bytes
    if gpu.inside is not None and gpu.inside.reserved_bytes:
        return "probe", float(gpu.inside.reserved_bytes)
    budget_bytes = _compute_budget(page, total_bytes)
    if budget_bytes:
        return "budget", budget_bytes
    if configured_bytes:
        return "configured", configured_bytes
    return None


def _compute_budget(page: EnginePage, total_bytes: int) -> float | None:
    """Return how much of a GPU's memory vLLM was configured to use.

    Returns None if the amount is unknown, or if the page's engines disagree on it.
    """
    budget_ratios = set[float]()
    for engine in page.engines:
        ratio = engine.gpu_memory_utilization_ratio
        # If the cache size is configured in bytes, the ratio does not determine the budget.
        if ratio is not None and engine.kv_cache_memory_bytes is None:
            budget_ratios.add(ratio)
    return budget_ratios.pop() * total_bytes if len(budget_ratios) == 1 else None


def find_budget(page: EnginePage, total_bytes: int, configured_bytes: float | None) -> float | None:
    """Return the engine's budget on a GPU, in bytes.

    If vLLM's settings do not determine the budget, it is the operator's `configured_bytes`. Returns
    None if both are unknown. Memory that torch has reserved is not a budget.
    """
    return _compute_budget(page, total_bytes) or configured_bytes or None
