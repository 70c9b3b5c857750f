"""The GPUs seen so far, so that a lost one stays listed."""

from __future__ import annotations

from typing import Final

from vllm_headroom.model import Failure, GpuReading
from vllm_headroom.scrape.nvml.device import Device
from vllm_headroom.scrape.nvml.errors import device_failure
from vllm_headroom.scrape.nvml.parts import Part
from vllm_headroom.scrape.nvml.xids import Xids
from vllm_headroom.vocabulary import Reason

Outcome = tuple[GpuReading, ...] | Failure

MOST_GPUS: Final = 64
"""Those that are gone the longest are forgotten beyond it: more than a machine has, if each came back as another."""


class Roster:
    """Knows the parts each GPU had when it was opened last, by the GPU's UUID.

    A GPU that is gone stays listed, with the MIG instances it had; an instance that is gone from a GPU that is there
    was removed on purpose and is forgotten.
    """

    def __init__(self, xids: Xids) -> None:
        self._known: dict[str, tuple[Part, ...]] = {}
        self._xids = xids

    def readings(self, outcomes: list[tuple[Device, Outcome]]) -> tuple[GpuReading, ...]:
        """Return what was read, a failed reading for each part that was not, and one for each part of a missing GPU."""
        for device, _ in outcomes:
            if device.gpu is not None:
                known = self._known.pop(device.gpu.uuid, (device.gpu,))
                self._known[device.gpu.uuid] = device.parts or known
        self._known = dict(tuple(self._known.items())[-MOST_GPUS:])
        missing = self._known.keys() - {device.gpu.uuid for device, _ in outcomes if device.gpu is not None}
        readings: list[GpuReading] = []
        for device, outcome in outcomes:
            readings += self._unread(device, missing, outcome) if isinstance(outcome, Failure) else outcome
        gone = device_failure(Reason.DEVICE_LOST)
        for uuid in sorted(missing):
            readings += self._failed(self._known[uuid], gone)
        return tuple(readings)

    def _unread(self, device: Device, missing: set[str], failure: Failure) -> list[GpuReading]:
        uuid = device.gpu.uuid if device.gpu is not None else self._last_at(device.index, missing)
        missing.discard(uuid)
        if not uuid:
            return [GpuReading(index=device.index, uuid="", name="", failure=failure)]
        return self._failed(self._known[uuid], failure)

    def _last_at(self, index: int, missing: set[str]) -> str:
        # A GPU that does not open does not tell its UUID: it is taken for the missing one that was at its index.
        return next((uuid for uuid in sorted(missing) if self._known[uuid][0].index == index), "")

    def _failed(self, parts: tuple[Part, ...], failure: Failure) -> list[GpuReading]:
        return [part.failed(failure, self._xids.counts(part.gpu_uuid, part.gpu_instance)) for part in parts]
