"""As vllm/device_allocator/cumem.py of 0.32: the pool that sleeps, and its bookkeeping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass
class AllocationData:
    handle: tuple[int, int, int, int]
    tag: str
    cpu_backup_tensor: Any = None
    is_asleep: bool = False


class CuMemAllocator:
    instance: ClassVar[CuMemAllocator | None] = None

    def __init__(self) -> None:
        self.pointer_to_data: dict[int, AllocationData] = {}
