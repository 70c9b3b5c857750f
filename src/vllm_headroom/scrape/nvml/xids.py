"""The XID errors that NVML reports as events."""

from __future__ import annotations

import contextlib
import ctypes
from collections import Counter, defaultdict
from typing import Any, Final

import pynvml

from vllm_headroom.scrape.nvml.calls import Handle

MOST_EVENTS: Final = 64
"""Events taken at a time, so that a storm of them does not keep the thread from reading memory."""

MOST_KINDS: Final = 128
"""Pairs of a code and an instance that a GPU's errors are counted by: several times what NVIDIA's catalogue could make.

Only a driver that is out of its mind reports more; those count as OTHER, which no driver reports.
"""
OTHER: Final = (0, pynvml.NVML_GPU_INSTANCE_ID_ANY)


class Xids:
    """Counts XID errors since it was made; listens from one init of NVML to the next.

    NVML tells the GPU of an event, in MIG mode also the GPU instance where it knows that. Events from before the
    listening began, or from between two inits, are not replayed.
    """

    def __init__(self) -> None:
        self._counts: defaultdict[str, Counter[tuple[int, int]]] = defaultdict(Counter)
        self._uuids: dict[int, str] = {}
        self._events: Any = None

    def begin(self) -> None:
        """Make the set of events that `listen` adds to; without support, the counts stay empty."""
        self._uuids = {}
        try:
            self._events = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError:
            self._events = None

    def end(self) -> None:
        """Let go of the set, before NVML is shut down."""
        if self._events is not None:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(self._events)
        self._events = None

    def listen(self, handle: Handle, uuid: str) -> None:
        """Count the XID errors of this GPU from now on. Raises NVMLError where the GPU has no such events."""
        if self._events is not None:
            pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self._events)
            self._uuids[_address(handle)] = uuid

    def poll(self) -> None:
        """Count the events that have arrived, without waiting for more."""
        if self._events is None or not self._uuids:
            return
        for _ in range(MOST_EVENTS):
            try:
                event = pynvml.nvmlEventSetWait_v2(self._events, 0)
            except pynvml.NVMLError:  # usually a timeout: nothing has arrived
                return
            uuid = self._uuids.get(_address(event.device))
            if uuid is not None:
                counts, kind = self._counts[uuid], (event.eventData, event.gpuInstanceId)
                counts[kind if kind in counts or len(counts) < MOST_KINDS else OTHER] += 1

    def counts(self, gpu_uuid: str, gpu_instance: int | None) -> tuple[tuple[int, int], ...]:
        """Return pairs of XID and count of a GPU, or of one MIG instance of it.

        An event for which NVML names no instance counts for each instance of the GPU: it may concern any of them.
        """
        counts: Counter[int] = Counter()
        for (xid, instance), count in tuple(self._counts.get(gpu_uuid, {}).items()):
            if gpu_instance is None or instance in (gpu_instance, pynvml.NVML_GPU_INSTANCE_ID_ANY):
                counts[xid] += count
        return tuple(sorted(counts.items()))


def _address(handle: Handle) -> int:
    # The GPU may be lost, so its handle must not be asked for its UUID; NVML gives one address per GPU.
    return ctypes.addressof(handle.contents)
