"""The GPUs of this machine, from all vendors."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from vllm_headroom.model import Failure, GpuReading, GpuReadings
from vllm_headroom.scrape.amd.reader import Amd
from vllm_headroom.scrape.nvml.device import GpuFaults
from vllm_headroom.scrape.nvml.reader import Nvml
from vllm_headroom.vocabulary import Reason

NO_NVIDIA_REASONS: Final = frozenset(
    {Reason.LIBRARY_MISSING, Reason.DRIVER_MISSING, Reason.NO_DEVICES}
)
"""The reasons for which NVML fails on a machine without an NVIDIA GPU."""

NO_AMD_NOTE: Final = "; nor is there a card of AMD's driver amdgpu in /sys/class/drm"


class Gpus:
    """Reads NVIDIA GPUs from NVML and AMD cards from `sys` at the same time."""

    def __init__(
        self,
        *,
        monotonic: Callable[[], float],
        call_timeout_seconds: float = 2.0,
        process_interval_seconds: float = 15.0,
        proc: Path = Path("/proc"),
        sys: Path = Path("/sys"),
    ) -> None:
        self._nvml = Nvml(
            monotonic=monotonic,
            call_timeout_seconds=call_timeout_seconds,
            process_interval_seconds=process_interval_seconds,
            proc=proc,
        )
        self._amd = Amd(monotonic=monotonic, sys=sys, proc=proc)
        self._nvidia_readings: tuple[GpuReading, ...] = ()
        self._amd_readings: tuple[GpuReading, ...] = ()

    async def read(self, timeout_seconds: float) -> GpuReadings | Failure:
        """Return one reading of every GPU; never raise.

        If NVML fails and there is no AMD card, NVML's failure is returned.
        """
        nvml, amd = await asyncio.gather(
            self._nvml.read(timeout_seconds), self._amd.read(timeout_seconds)
        )
        if isinstance(nvml, Failure) and not amd:
            # If there is no NVIDIA GPU, the operator may expect an AMD card. The message therefore
            # adds that there is no AMD card either.
            if nvml.reason in NO_NVIDIA_REASONS:
                return replace(nvml, message=nvml.message + NO_AMD_NOTE)
            return nvml
        self._nvidia_readings = self._complete_nvidia(nvml)
        self._amd_readings = self._number_amd(amd)
        return GpuReadings(
            driver_version=None if isinstance(nvml, Failure) else nvml.driver_version,
            devices=self._nvidia_readings + self._amd_readings,
        )

    def _complete_nvidia(self, nvml: GpuReadings | Failure) -> tuple[GpuReading, ...]:
        """Return the readings of NVIDIA GPUs on a machine that may also have AMD cards.

        If NVML fails, each GPU in NVML's last reading gets a failed reading.
        """
        if not isinstance(nvml, Failure):
            return nvml.devices
        if not self._nvidia_readings and nvml.reason not in NO_NVIDIA_REASONS:
            # Any reason outside NO_NVIDIA_REASONS occurs only on a machine with a GPU. No GPU has
            # been read yet, so the names are unknown.
            return (GpuReading(index=0, uuid="", name="", failure=nvml),)
        return tuple(reading.mark_failed(nvml) for reading in self._nvidia_readings)

    def _number_amd(self, amd: tuple[GpuReading, ...]) -> tuple[GpuReading, ...]:
        """Return the readings of AMD cards, numbered after the NVIDIA GPUs.

        If the machine has another GPU, integrated GPUs are omitted, because they drive the display.
        """
        discrete = tuple(
            reading for reading in amd if reading.uuid not in self._amd.integrated_uuids
        )
        shown = discrete if self._nvidia_readings or discrete else amd
        nvidia_indices = [reading.index for reading in self._nvidia_readings]
        first_index = max(nvidia_indices, default=-1) + 1
        return tuple(replace(reading, index=first_index + reading.index) for reading in shown)

    async def sample_used(self, timeout_seconds: float) -> Mapping[str, int]:
        """Return each GPU's memory in use, keyed by UUID, and update the peaks; never raise.

        GPUs that cannot be read now are omitted.
        """
        nvidia_used_bytes, amd_used_bytes = await asyncio.gather(
            self._nvml.sample_used(timeout_seconds), self._amd.sample_used(timeout_seconds)
        )
        return {**nvidia_used_bytes, **amd_used_bytes}

    async def read_faults(self, timeout_seconds: float) -> tuple[GpuFaults, ...]:
        """Return the memory faults of each GPU in the last reading; never raise.

        GPUs that cannot be read are omitted. For an AMD card, all faults are None.
        """
        nvidia_faults = await self._nvml.read_faults(timeout_seconds)
        amd_indices = {reading.index for reading in self._amd_readings}
        return nvidia_faults + tuple(GpuFaults(index=index) for index in amd_indices)

    async def close(self) -> None:
        """Release both drivers."""
        self._amd.close()
        await self._nvml.close()
