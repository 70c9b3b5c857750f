"""What vLLM asks of a GPU when it starts, and what it finds there."""

from __future__ import annotations

from math import ceil
from typing import Final

from msgspec import Struct

from vllm_headroom.model import GpuMemory
from vllm_headroom.sizing.overhead import LEFT_TO_THE_MACHINE_BYTES
from vllm_headroom.units import GIB

LEAST_OWN_BYTES: Final = 3 * GIB // 10
"""vLLM looks at the free memory when its own CUDA context, and from 0.11 on NCCL's buffers, already lie on the GPU.
In its line "Free memory on device (F/T GiB) on startup" the two are 0.33 (B200) to 0.53 GiB (H100) apart on GPUs that
are otherwise empty, and 0.49 to 0.96 GiB with tensor parallelism.
"""

MOST_OWN_BYTES: Final = 6 * GIB // 10
MOST_OWN_BYTES_IN_PARALLEL: Final = GIB


class Ask(Struct, frozen=True, kw_only=True):
    """What vLLM is told: a share of each GPU, bytes on each GPU, or both; and its tensor-parallel size."""

    utilization_ratio: float | None
    bytes_per_gpu: int | None = None
    tensor_parallel_size: int = 1

    @property
    def most_own_bytes(self) -> int:
        """What vLLM may take for itself before it looks."""
        return MOST_OWN_BYTES_IN_PARALLEL if self.tensor_parallel_size > 1 else MOST_OWN_BYTES


def asked_bytes(ask: Ask, memory: GpuMemory) -> int:
    """Return what has to be free: vLLM refuses to start with less (vllm/v1/worker/utils.py: request_memory)."""
    ratio = ask.utilization_ratio
    return max(0 if ratio is None else ceil(ratio * memory.usable_bytes), ask.bytes_per_gpu or 0)


def highest_utilization(ask: Ask, memory: GpuMemory) -> float | None:
    """Return the highest gpu_memory_utilization that would surely work now, rounded down to 0.01; None for none."""
    available = memory.machine_available_bytes
    free_bytes = (
        memory.free_bytes if available is None else min(memory.free_bytes, available - LEFT_TO_THE_MACHINE_BYTES)
    )
    left_bytes = free_bytes - ask.most_own_bytes
    hundredths = left_bytes * 100 // memory.usable_bytes if memory.usable_bytes > 0 else 0
    return hundredths / 100 if hundredths > 0 else None
