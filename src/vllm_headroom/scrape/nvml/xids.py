"""Count the XID errors that NVML reports."""

import contextlib
import ctypes
from collections import Counter, defaultdict
from typing import Any, Final

import pynvml

Handle = Any
"""NVML's pointer to a device. The pointer is valid until NVML is shut down or the device is lost.
"""

XidKind = tuple[int, int]
"""An XID and the number of the affected MIG instance. If NVML does not report an instance, the
number is NVML_GPU_INSTANCE_ID_ANY.
"""

XidCounts = tuple[tuple[int, int], ...]
"""Pairs of XID and count."""

MAX_EVENTS: Final = 64
"""The maximum number of events read per poll. With this limit, a flood of events does not delay
memory readings.
"""

MAX_KINDS: Final = 128
"""The maximum number of kinds counted per GPU. NVIDIA's catalogue is several times smaller. Only a
faulty driver reports more. Any further kinds count as OTHER_KIND.
"""

OTHER_KIND: Final[XidKind] = (0, pynvml.NVML_GPU_INSTANCE_ID_ANY)


class Xids:
    """Counts the XID errors of GPUs from the time when this object is created.

    `listen` must be called again after each init of NVML. For each event, NVML reports the GPU. In
    MIG mode, it also reports the GPU instance if known. NVML does not replay earlier events.
    """

    def __init__(self) -> None:
        self._counts: defaultdict[str, Counter[XidKind]] = defaultdict(Counter)
        """The counts, keyed by the UUID of the whole GPU."""
        self._uuids_by_address: dict[int, str] = {}
        """The UUIDs of the GPUs whose events are counted, by their addresses in NVML."""
        self._event_set: Any = None
        """NVML's event set, or None between two inits or if NVML could not create one."""

    def begin(self) -> None:
        """Create NVML's event set after an init; if that fails, nothing is counted."""
        self._uuids_by_address = {}
        self._event_set = None
        with contextlib.suppress(pynvml.NVMLError):
            self._event_set = pynvml.nvmlEventSetCreate()

    def end(self) -> None:
        """Free the event set. The set must be freed before NVML is shut down."""
        event_set = self._event_set
        self._event_set = None
        if event_set is not None:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(event_set)

    def listen(self, handle: Handle, uuid: str) -> None:
        """Count the XID errors of this GPU from now on.

        Raises NVMLError if the GPU does not report XID events.
        """
        if self._event_set is not None:
            pynvml.nvmlDeviceRegisterEvents(
                handle, pynvml.nvmlEventTypeXidCriticalError, self._event_set
            )
            self._uuids_by_address[_find_address(handle)] = uuid

    def poll(self) -> None:
        """Count the events that have arrived, without waiting for more."""
        if self._event_set is None or not self._uuids_by_address:
            return
        for _ in range(MAX_EVENTS):
            try:
                event = pynvml.nvmlEventSetWait_v2(self._event_set, 0)
            except pynvml.NVMLError:  # Usually, this is a timeout, because no event has arrived.
                return
            uuid = self._uuids_by_address.get(_find_address(event.device))
            if uuid is not None:
                self._count(uuid, (event.eventData, event.gpuInstanceId))

    def _count(self, uuid: str, kind: XidKind) -> None:
        """Count one error, under OTHER_KIND if the GPU already has MAX_KINDS kinds."""
        counts = self._counts[uuid]
        if kind not in counts and len(counts) >= MAX_KINDS:
            kind = OTHER_KIND
        counts[kind] += 1

    def list_counts(self, gpu_uuid: str, gpu_instance: int | None) -> XidCounts:
        """Return pairs of XID and count, sorted by XID.

        The tuple is empty if there was no error. If `gpu_instance` is None, the errors of the whole
        GPU are counted. If `gpu_instance` is a number, the errors of this MIG instance are counted.
        An event without an instance counts for every instance.
        """
        counts: Counter[int] = Counter()
        # The counts are copied, because NVML's thread may be updating them at the same time.
        kinds = tuple(self._counts.get(gpu_uuid, {}).items())
        for (xid, instance), count in kinds:
            if gpu_instance is None or instance in (gpu_instance, pynvml.NVML_GPU_INSTANCE_ID_ANY):
                counts[xid] += count
        return tuple(sorted(counts.items()))


def _find_address(handle: Handle) -> int:
    # The address identifies the GPU. The UUID of a lost GPU cannot be read through its handle.
    return ctypes.addressof(handle.contents)
