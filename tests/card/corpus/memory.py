"""Memory of the card, as an engine takes it: through torch's allocator, or from the runtime beside it."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import torch

MIB: Final = 2**20
GIB: Final = 2**30
OUT_OF_MEMORY: Final = torch.OutOfMemoryError

_runtime = ctypes.CDLL("libcudart.so.13")


def take(n_bytes: float) -> Any:
    """Return a tensor of so many bytes; its memory is free once nothing refers to it."""
    return torch.empty(max(1, int(n_bytes)), dtype=torch.uint8, device="cuda")


def take_outside_torch(n_bytes: float) -> None:
    """Take memory that torch does not know and nobody frees, as libraries do."""
    if _runtime.cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(int(n_bytes))):
        raise OUT_OF_MEMORY("CUDA out of memory, outside torch.")


def release_cache() -> None:
    """Return to the card what torch has cached."""
    torch.cuda.empty_cache()


def set_allocator(settings: str) -> None:
    """Set what PYTORCH_CUDA_ALLOC_CONF sets, before anything is allocated."""
    torch._C._accelerator_setAllocatorSettings(settings)  # the environment was read at the import


def limit_to(share: float) -> None:
    """Limit torch to a share of the card; without a limit garbage_collection_threshold does nothing."""
    torch.cuda.set_per_process_memory_fraction(share)


def read_free() -> tuple[int, int]:
    """Return the free and all bytes of the card, as the runtime answers."""
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return int(free_bytes), int(total_bytes)


def read_peak() -> int:
    """Return the most that torch has reserved so far."""
    return int(torch.cuda.max_memory_reserved())


def read_inside() -> dict[str, Any]:
    """Return what a probe in the process would read of torch's allocator."""
    stats = torch._C._cuda_memoryStats(0)  # memory_stats() takes ten times as long
    kinds = {name: stats[f"{name}_bytes"]["all"]["current"] for name in ("allocated", "reserved", "inactive_split")}
    return {
        "allocated": kinds["allocated"],
        "reserved_by_torch": kinds["reserved"],
        "parts": {"fragmented": kinds["inactive_split"]},
    }


def read_retries() -> int:
    """Return how often an allocation failed and was tried again after the cache was released."""
    return int(torch._C._cuda_memoryStats(0)["num_alloc_retries"])
