"""What is known of the host's memory: the machine's, and that of the container the engine runs in."""

from __future__ import annotations

from msgspec import Struct

from vllm_headroom.vocabulary import HostBasis


class Cgroup(Struct, frozen=True, kw_only=True):
    """What the kernel counts of a container; `limit_bytes` is None where it may take all that the machine has.

    `cache_bytes` is part of `used_bytes` and is taken back before anything is killed: files that were read, weights
    that are mapped. `identity` tells a container from the next one of the same name.
    """

    identity: str
    used_bytes: int
    cache_bytes: int
    limit_bytes: int | None
    oom_kills: int | None


class MachineMemory(Struct, frozen=True, kw_only=True):
    """The memory of the machine as /proc tells it; `available_bytes` counts what the kernel can take back.

    `swap_bytes` is the size of all swap, zram and zswap included, and `swap_free_bytes` what of it is free. `oom_kills`
    counts what the kernel killed anywhere on the machine since it booted.
    """

    total_bytes: int
    available_bytes: int
    swap_bytes: int = 0
    swap_free_bytes: int = 0
    oom_kills: int | None = None


class Shm(Struct, frozen=True, kw_only=True):
    """The size of a /dev/shm and what is free in it."""

    total_bytes: int
    free_bytes: int

    @property
    def used_bytes(self) -> int:
        """What is in use in it."""
        return self.total_bytes - self.free_bytes


class HostReading(Struct, frozen=True, kw_only=True):
    """What one look showed: the container of the engine's processes, the machine, their /dev/shm; None where unseen."""

    cgroup: Cgroup | None = None
    machine: MachineMemory | None = None
    shm: Shm | None = None


class HostMemory(Struct, frozen=True, kw_only=True):
    """The host memory that the engine runs in, and how it is known; None where it is not.

    `used_bytes` is what counts against `limit_bytes` and cannot be taken back. `oom_kills` is what the kernel killed in
    it since it was first seen.
    """

    basis: HostBasis | None = None
    used_bytes: int | None = None
    limit_bytes: int | None = None
    shm_used_bytes: int | None = None
    shm_limit_bytes: int | None = None
    oom_kills: int | None = None

    @property
    def room_bytes(self) -> int | None:
        """What is left before the kernel kills; None where it is not known."""
        if self.used_bytes is None or self.limit_bytes is None:
            return None
        return max(0, self.limit_bytes - self.used_bytes)
