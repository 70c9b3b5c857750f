"""The GPUs of this machine, of every vendor."""

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

NO_NVIDIA: Final = frozenset({Reason.LIBRARY_MISSING, Reason.DRIVER_MISSING, Reason.NO_DEVICES})
"""NVML's failures on a machine without a GPU of NVIDIA's."""

NO_AMD: Final = "; nor is there a card of AMD's driver amdgpu in /sys/class/drm"


class Gpus:
    """Reads NVIDIA's GPUs from NVML and AMD's from `sys`, without integrated ones beside others, in parallel."""

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
        self._of_nvidia: tuple[GpuReading, ...] = ()
        self._of_amd: tuple[GpuReading, ...] = ()

    async def read(self, timeout_seconds: float) -> GpuReadings | Failure:
        """Return one reading of every GPU in time, or the failure of NVML where AMD has none; never raise."""
        nvml, amd = await asyncio.gather(
            self._nvml.read(timeout_seconds), self._amd.read(timeout_seconds)
        )
        if isinstance(nvml, Failure) and not amd:
            return (
                replace(nvml, message=nvml.message + NO_AMD) if nvml.reason in NO_NVIDIA else nvml
            )
        if not isinstance(nvml, Failure):
            of_nvidia = nvml.devices
        elif (
            not self._of_nvidia and nvml.reason not in NO_NVIDIA
        ):  # of an unknown GPU: there should be some
            of_nvidia = (GpuReading(index=0, uuid="", name="", failure=nvml),)
        else:
            of_nvidia = tuple(each.failed(nvml) for each in self._of_nvidia)
        self._of_nvidia = of_nvidia
        own = tuple(reading for reading in amd if reading.uuid not in self._amd.integrated)
        first = 1 + max((reading.index for reading in of_nvidia), default=-1)
        shown = own if of_nvidia or own else amd
        self._of_amd = tuple(replace(reading, index=first + reading.index) for reading in shown)
        driver_version = None if isinstance(nvml, Failure) else nvml.driver_version
        return GpuReadings(driver_version=driver_version, devices=(*of_nvidia, *self._of_amd))

    async def sample_used(self, timeout_seconds: float) -> Mapping[str, int]:
        """Return the memory in use by UUID, and add it to each GPU's peak."""
        looks = self._nvml.sample_used(timeout_seconds), self._amd.sample_used(timeout_seconds)
        of_nvidia, of_amd = await asyncio.gather(*looks)
        return {**of_nvidia, **of_amd}

    async def faults(self, timeout_seconds: float) -> tuple[GpuFaults, ...]:
        """Return the memory faults of each GPU of the last reading; one that fails is left out."""
        unknown = (GpuFaults(index=index) for index in {reading.index for reading in self._of_amd})
        return *(await self._nvml.faults(timeout_seconds)), *unknown

    async def close(self) -> None:
        """Release both drivers."""
        self._amd.close()
        await self._nvml.close()
