"""Other cards than the demo's one of 80 GB: eight of them of which one leaks, a card in MIG instances, a small one."""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

from msgspec.structs import replace

from vllm_headroom.model import GpuMemory, GpuReading, GpuReadings
from vllm_headroom_tools.demo.run import SimulatedGpus

LEAKING: Final = 5
INSTANCES: Final = tuple(f"MIG-{letter * 8}-0000-5000-8000-000000000000" for letter in ("a", "b", "c"))
SMALL: Final = 0.3
"""A card of 24 GB over the demo's, which has 80."""


class SeveralGpus(SimulatedGpus):
    """What is made of the world's GPU as it began and as it is now."""

    first_reading: GpuReading | None = None

    async def read(self, timeout_seconds: float) -> GpuReadings:
        """Return one reading of the devices."""
        readings = await super().read(timeout_seconds)
        (now,) = readings.devices
        self.first_reading = self.first_reading or now
        return replace(readings, devices=self.devices(self.first_reading, now))

    @abstractmethod
    def devices(self, first_reading: GpuReading, now: GpuReading) -> tuple[GpuReading, ...]:
        """Return the devices."""


class EightGpus(SeveralGpus):
    """The GPUs of an engine with a process on each; the world's leak is GPU 5's, the others stay as they began."""

    def devices(self, reading: GpuReading, now: GpuReading) -> tuple[GpuReading, ...]:
        """Return the GPUs."""
        return tuple(_numbered(now if gpu == LEAKING else reading, gpu) for gpu in range(8))


class MigInstances(SeveralGpus):
    """Three instances of card 1: the first is the world's, the second stays as it began, the third is another's."""

    def devices(self, reading: GpuReading, now: GpuReading) -> tuple[GpuReading, ...]:
        """Return the instances."""
        instance_readings = (now, reading, replace(reading, processes=()))
        return tuple(
            replace(device, index=1, uuid=uuid) for device, uuid in zip(instance_readings, INSTANCES, strict=True)
        )


class SmallCard(SimulatedGpus):
    """A card of 24 GB with everything on it in proportion."""

    async def read(self, timeout_seconds: float) -> GpuReadings:
        """Return one reading of the device."""
        readings = await super().read(timeout_seconds)
        return replace(readings, devices=tuple(_shrunk(device) for device in readings.devices))


def numbered_uuid(gpu: int) -> str:
    """Return the UUID of one of the eight GPUs."""
    return f"GPU-{gpu:08}-0000-4000-8000-000000000000"


def _numbered(device: GpuReading, gpu: int) -> GpuReading:
    return replace(device, index=gpu, uuid=numbered_uuid(gpu))


def _shrunk(device: GpuReading) -> GpuReading:
    memory = device.memory
    assert isinstance(memory, GpuMemory)
    assert memory.reserved_bytes is not None
    assert device.used_peak_bytes is not None
    used, total, reserved = (
        int(SMALL * memory_bytes) for memory_bytes in (memory.used_bytes, memory.total_bytes, memory.reserved_bytes)
    )
    small = GpuMemory(total_bytes=total, used_bytes=used, free_bytes=total - used - reserved, reserved_bytes=reserved)
    assert device.processes is not None
    processes = tuple(
        replace(process, used_bytes=int(SMALL * (process.used_bytes or 0))) for process in device.processes
    )
    return replace(
        device,
        name="Simulated L4 24GB",
        memory=small,
        used_peak_bytes=int(SMALL * device.used_peak_bytes),
        processes=processes,
    )
