"""What do the engine's processes say of the memory they hold on each GPU?"""

from __future__ import annotations

from collections.abc import Iterator

from vllm_headroom import catalog
from vllm_headroom.derive.readings import gpu_labels
from vllm_headroom.model import Gpu, Sample, Snapshot


def inside(snapshot: Snapshot) -> tuple[Sample, ...]:
    """Return the ledger and the allocator's figures of each GPU that a present process speaks of."""
    return tuple(sample for gpu in snapshot.devices for sample in _of_gpu(gpu))


def _of_gpu(gpu: Gpu) -> Iterator[Sample]:
    if gpu.inside is None:
        return
    labels = gpu_labels(gpu)
    for part, part_bytes in gpu.inside.parts:
        yield Sample(catalog.ENGINE_MEMORY, (*labels, str(part)), float(part_bytes))
    if gpu.inside.allocated_bytes is not None:
        yield Sample(catalog.ALLOCATOR_ALLOCATED, labels, float(gpu.inside.allocated_bytes))
    if gpu.inside.reserved_bytes is not None:
        yield Sample(catalog.ALLOCATOR_RESERVED, labels, float(gpu.inside.reserved_bytes))
