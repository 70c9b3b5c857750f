"""The readings as samples, with names that do not change between engine versions."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from vllm_headroom import catalog
from vllm_headroom.derive.pages import list_named
from vllm_headroom.derive.series import label_engine, label_gpu, make_facts
from vllm_headroom.model import INPUTS, Gpu, Metric, Sample, Snapshot

_GPU_FACTS: Final[tuple[tuple[Metric, str], ...]] = (
    (catalog.GPU_MEMORY_USED_PEAK, "used_peak_bytes"),
    (catalog.GPU_UTILIZATION, "utilization_ratio"),
    (catalog.GPU_TEMPERATURE, "temperature_celsius"),
    (catalog.GPU_POWER, "power_watts"),
)
_MEMORY_FACTS: Final[tuple[tuple[Metric, str], ...]] = (
    (catalog.GPU_MEMORY_TOTAL, "total_bytes"),
    (catalog.GPU_MEMORY_USED, "used_bytes"),
    (catalog.GPU_MEMORY_FREE, "free_bytes"),
    (catalog.GPU_MEMORY_RESERVED, "reserved_bytes"),
    (catalog.UNIFIED_FREE_BLOCKS, "machine_free_blocks_bytes"),
)
_INSIDE_FACTS: Final[tuple[tuple[Metric, str], ...]] = (
    (catalog.ALLOCATOR_ALLOCATED, "allocated_bytes"),
    (catalog.ALLOCATOR_RESERVED, "reserved_bytes"),
)
_MOST_CACHED_GPUS: Final = 64
"""The number of cached GPUs. The largest machine has 16 GPUs. Each has two versions (for its engine
and for all others), over two ticks. The cache takes 0.2 MB.
"""

_ENGINE_FACTS: Final = tuple(
    (catalog.BY_NAME[source.metric], field) for field, source in INPUTS.items() if source.metric
)


def derive_readings(snapshot: Snapshot) -> tuple[Sample, ...]:
    """Return the readings of GPUs and engines, and the availability of inputs, as samples."""
    samples: list[Sample] = []
    for gpu in snapshot.devices:
        samples += _derive_gpu(gpu)
    page = snapshot.page
    if page is None:
        return tuple(samples)
    for name, is_present in page.inputs:
        samples.append(Sample(catalog.INPUT_AVAILABLE, (name,), float(is_present)))
    for engine in list_named(page):
        labels = label_engine(engine)
        samples.append(Sample(catalog.ENGINE_INFO, (*labels, page.profile), 1.0))
        samples += make_facts(_ENGINE_FACTS, labels, engine)
    return tuple(samples)


@lru_cache(maxsize=_MOST_CACHED_GPUS)
def _derive_gpu(gpu: Gpu) -> tuple[Sample, ...]:
    """Return the samples of one GPU, no matter which process uses it.

    The result is cached. A daemon that watches several engines reads each GPU once per tick. The
    data differs only for the engine that holds the GPU.
    """
    return tuple(_list_gpu_samples(gpu))


def _list_gpu_samples(gpu: Gpu) -> Iterator[Sample]:
    """Yield the samples of one GPU."""
    labels = label_gpu(gpu)
    reading = gpu.reading
    name = reading.name
    # With unified memory, a GPU's figures describe the machine's memory. The GPU's name is
    # therefore marked.
    if reading.memory is not None and reading.memory.is_unified:
        name += " (unified memory)"
    yield Sample(catalog.GPU_INFO, (*labels, name, gpu.attribution or ""), 1.0)
    yield Sample(catalog.GPU_UP, labels, float(reading.failure is None))
    if reading.memory is not None:
        yield from make_facts(_MEMORY_FACTS, labels, reading.memory)
        yield from _derive_holders(gpu, reading.memory.used_bytes)
    if gpu.process_count is not None:
        yield Sample(catalog.GPU_PROCESSES, labels, float(gpu.process_count))
    # If the driver does not report a size, the sample is omitted. A size of 0 would mean that
    # nothing is held.
    leftover_sizes = [
        leftover.used_bytes for leftover in gpu.leftovers if leftover.used_bytes is not None
    ]
    if leftover_sizes:
        yield Sample(catalog.GPU_MEMORY_LEFT_BEHIND, labels, float(sum(leftover_sizes)))
    yield from make_facts(_GPU_FACTS, labels, reading)
    yield from make_facts(_INSIDE_FACTS, labels, gpu.inside)
    if gpu.inside is not None:
        for part, part_bytes in gpu.inside.parts:
            yield Sample(catalog.ENGINE_MEMORY, (*labels, str(part)), float(part_bytes))
    for xid, count in reading.xid_errors:
        yield Sample(catalog.GPU_XID_ERRORS, (*labels, str(xid)), float(count))


def _derive_holders(gpu: Gpu, used_bytes: int) -> Iterator[Sample]:
    """Yield how much memory each holder has.

    The sizes add up to the memory in use.
    """
    labels = label_gpu(gpu)
    unattributed_bytes = used_bytes
    for holder, held_bytes in (("engine", gpu.engine_bytes), ("other", gpu.other_bytes)):
        if held_bytes is not None:
            unattributed_bytes -= held_bytes
            yield Sample(catalog.GPU_MEMORY_HELD, (*labels, holder), float(held_bytes))
    yield Sample(catalog.GPU_MEMORY_HELD, (*labels, "unattributed"), float(unattributed_bytes))
