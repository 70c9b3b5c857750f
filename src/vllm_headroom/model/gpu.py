"""What is known of a GPU: what its driver says, and whose it is."""

from __future__ import annotations

import re
from enum import Enum, StrEnum
from typing import Final

from msgspec import Struct

from vllm_headroom.model.inside import Inside
from vllm_headroom.model.reading import Failure
from vllm_headroom.vocabulary import Attribution

_PART: Final = re.compile(r"(MIG-.{1,8}).*|(?:GPU-[0-9a-f]+|PCI-[0-9a-f:.]+)-([0-9]+)", re.IGNORECASE)


class Vendor(Enum):
    """Whose driver shows a GPU."""

    NVIDIA = "nvidia"
    AMD = "amd"


class GpuMemory(Struct, frozen=True, kw_only=True):
    """NVML memory info v2; in v1, `reserved_bytes` is None and `used_bytes` contains the reserved memory.

    AMD's driver tells it as v1 does. `machine_available_bytes` is set where the GPU works on the machine's memory: what
    the kernel calls available there, for the GPU and all else.
    """

    total_bytes: int
    used_bytes: int
    free_bytes: int
    reserved_bytes: int | None
    machine_available_bytes: int | None = None

    @property
    def usable_bytes(self) -> int:
        """What CUDA calls the GPU's total, of which vLLM takes its share: NVML's less what the driver reserves.

        Seen: 95.59 GiB in NVML, 94.97 in CUDA (ollama/ollama#18201). Where NVML does not tell what is reserved, this is
        NVML's total, and what follows errs on the safe side.
        """
        return self.total_bytes - (self.reserved_bytes or 0)

    @property
    def left_bytes(self) -> int:
        """What is left of that."""
        return self.usable_bytes - self.used_bytes

    @property
    def unified(self) -> bool:
        """Whether it is the machine's own memory: what is used of it is used by all that runs there."""
        return self.machine_available_bytes is not None


class GpuProcess(Struct, frozen=True, kw_only=True):
    """A compute process on a GPU; `used_bytes` is None where the driver does not tell."""

    pid: int
    used_bytes: int | None


def part_of(uuid: str) -> str:
    """Return what tells a MIG instance, or a partition of an AMD card, from the others of its index; "" of a whole GPU.

    Of a MIG instance's UUID that is as much as a person compares.
    """
    found = _PART.fullmatch(uuid)
    return "" if found is None else found[1] or f"partition {found[2]}"


def called(index: int | str, uuid: str) -> str:
    """Return what a person calls a device in a sentence."""
    return f"GPU {index} {part_of(uuid)}".rstrip()


class Fate(StrEnum):
    """What became of a process that holds GPU memory for no engine any more."""

    ORPHANED = "orphaned"
    ZOMBIE = "zombie"
    VANISHED = "vanished"


class Leftover(Struct, frozen=True, kw_only=True):
    """What a process holds of a GPU for no engine any more; `used_bytes` is None where the driver does not tell."""

    pid: int
    fate: Fate
    used_bytes: int | None


class Device(Struct, frozen=True, kw_only=True):
    """A whole GPU or a part of one, as it is told from others."""

    index: int
    uuid: str

    @property
    def called(self) -> str:
        """What a person calls it in a sentence."""
        return called(self.index, self.uuid)


class GpuReading(Device, frozen=True, kw_only=True):
    """What is told of one device, a whole GPU or a part of one: a MIG instance, or a partition of an AMD card.

    What the device does not support is None. `index` is NVML's; AMD's cards are counted on from there.

    `failure` is set when the device cannot be read: then everything but index, uuid, name and xid_errors is None.
    `processes` is None when the list could not be read, which is not the same as an empty list.
    `xid_errors` pairs XID codes with their count since the daemon started.
    """

    name: str
    memory: GpuMemory | None = None
    used_peak_bytes: int | None = None
    utilization_ratio: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    processes: tuple[GpuProcess, ...] | None = None
    xid_errors: tuple[tuple[int, int], ...] = ()
    failure: Failure | None = None
    vendor: Vendor = Vendor.NVIDIA

    def failed(self, failure: Failure) -> GpuReading:
        """Return the reading of the same device when it cannot be read; XID errors are counted here and stay known."""
        return GpuReading(
            index=self.index,
            uuid=self.uuid,
            name=self.name,
            xid_errors=self.xid_errors,
            failure=failure,
            vendor=self.vendor,
        )


class GpuReadings(Struct, frozen=True, kw_only=True):
    """All devices that show; `driver_version` is NVIDIA's, None where its driver does not tell it."""

    driver_version: str | None
    devices: tuple[GpuReading, ...]


class Gpu(Struct, frozen=True, kw_only=True):
    """A device with its owner: `attribution` is None where it is not taken for the engine's.

    `engine_bytes` and `other_bytes` are None where the processes on the device cannot be told apart.
    `held_bytes` is what the engine is taken to hold: `engine_bytes`, or where these can never be known all that is used
    and not known to be others'; None while they are unknown for now, and on a device that is not the engine's.
    `process_count` is the number of compute processes NVML lists, `leftovers` those of them that are sure to serve no
    engine any more. `inside` is what the engine's processes say themselves.
    """

    reading: GpuReading
    attribution: Attribution | None
    engine_bytes: int | None = None
    other_bytes: int | None = None
    held_bytes: int | None = None
    process_count: int | None = None
    leftovers: tuple[Leftover, ...] = ()
    inside: Inside | None = None

    @property
    def left_out(self) -> bool:
        """Whether processes that serve the engine hold memory of it, and the operator's list leaves it out."""
        return bool(self.engine_bytes) and self.attribution is None and not self.leftovers
