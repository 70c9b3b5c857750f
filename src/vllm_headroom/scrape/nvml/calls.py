"""What NVML's errors and events mean."""

import contextlib
import ctypes
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any, Final

import pynvml

from vllm_headroom.model import Failure
from vllm_headroom.scrape.shortage import SHORTAGES, build_unavailable
from vllm_headroom.vocabulary import Reason, Source

DRIVER_WIDE: Final = frozenset(
    {
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    }
)
"""No device can be read before NVML is initialised again."""

LOST: Final = frozenset(
    {
        pynvml.NVML_ERROR_GPU_IS_LOST,
        pynvml.NVML_ERROR_RESET_REQUIRED,
        pynvml.NVML_ERROR_GPU_NOT_FOUND,
    }
)
"""The device's handle must not be used again: that has crashed processes (XuehaiPan/nvitop#139, #145)."""

BLOCKED: Final = frozenset({pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_OPERATING_SYSTEM})
"""The device node is not accessible (NVIDIA/nvidia-container-toolkit#48); healthy devices return it at times too."""

NEVER_ANSWERED: Final = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    }
)
"""The device will never answer this call."""

_SOURCE_REASONS: Final = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: Reason.LIBRARY_MISSING,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: Reason.DRIVER_MISSING,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: Reason.VERSION_MISMATCH,
    pynvml.NVML_ERROR_NO_PERMISSION: Reason.NO_PERMISSION,
    pynvml.NVML_ERROR_NOT_FOUND: Reason.NO_DEVICES,
    pynvml.NVML_ERROR_GPU_NOT_FOUND: Reason.NO_DEVICES,
    **dict.fromkeys(BLOCKED, Reason.UNKNOWN),
}
_IN_LOG: Final = "in the node's kernel log"
_SOURCE_MESSAGES: Final = {
    Reason.LIBRARY_MISSING: (
        "libnvidia-ml.so.1 cannot be loaded here: a machine needs NVIDIA's driver, a container the nvidia runtime"
        " (runtimeClassName: nvidia), NVIDIA_VISIBLE_DEVICES and NVIDIA_DRIVER_CAPABILITIES=utility"
    ),
    Reason.DRIVER_MISSING: "the NVIDIA driver is not loaded on this node: load it, or move the pod to a node with GPUs",
    Reason.VERSION_MISMATCH: (
        "the NVIDIA library in this container is not of the loaded driver's version, as after a driver upgrade:"
        " restart the container, and reboot the node if that does not help"
    ),
    Reason.NO_PERMISSION: "this user may not use NVML: let the container's user open /dev/nvidiactl",
    Reason.NO_DEVICES: (
        "NVML shows no GPU here: set NVIDIA_VISIBLE_DEVICES of this container to all or to the engine's GPUs"
    ),
    Reason.TIMEOUT: f"NVML does not answer: look for NVRM and Xid lines {_IN_LOG}, and reboot the node if it stays so",
    Reason.UNKNOWN: (
        "NVML fails on every GPU: if it stays so, the container has lost its devices (restart it) or the driver is ill"
        f" (look for NVRM lines {_IN_LOG})"
    ),
    Reason.DRIVER_ERROR: f"NVML fails for now and is tried again: look for NVRM lines {_IN_LOG}",
}
_DEVICE_REASONS: Final = {
    **dict.fromkeys(LOST, Reason.DEVICE_LOST),
    pynvml.NVML_ERROR_NO_PERMISSION: Reason.NO_PERMISSION,
    pynvml.NVML_ERROR_TIMEOUT: Reason.TIMEOUT,
    **dict.fromkeys(BLOCKED, Reason.UNKNOWN),
}
_DEVICE_MESSAGES: Final = {
    Reason.DEVICE_LOST: f"the GPU is lost: look for Xid lines {_IN_LOG}, then reset the GPU or reboot the node",
    Reason.TIMEOUT: f"the GPU does not answer: look for Xid lines {_IN_LOG}, and reset the GPU if it stays so",
    Reason.NO_PERMISSION: (
        "this container may not open the GPU: leave it out of NVIDIA_VISIBLE_DEVICES, or give the container access"
    ),
    Reason.UNKNOWN: (
        "the GPU cannot be read: if it stays so, restart the container, then look into the node's kernel log"
    ),
    Reason.DRIVER_ERROR: f"the GPU cannot be read: look for NVRM and Xid lines {_IN_LOG}",
}


def explain_source(cause: Reason | int) -> Failure:
    """Return the failure of NVML as a whole, by its reason or NVML's error code."""
    return _explain(cause, _SOURCE_REASONS, _SOURCE_MESSAGES)


def explain_device(cause: Reason | int) -> Failure:
    """Return the failure of one device, by its reason or NVML's error code."""
    return _explain(cause, _DEVICE_REASONS, _DEVICE_MESSAGES)


def _explain(
    cause: Reason | int, reasons: Mapping[int, Reason], messages: Mapping[Reason, str]
) -> Failure:
    if isinstance(cause, Reason):
        return Failure(source=Source.NVML, reason=cause, message=messages[cause])
    reason = reasons.get(cause, Reason.DRIVER_ERROR)
    return Failure(
        source=Source.NVML, reason=reason, message=f"{messages[reason]} (NVML error {cause})"
    )


def explain_unexpected(error: Exception) -> Failure:
    """Return the failure of an error that is not NVML's: a shortage on this side, or an unknown error."""
    if isinstance(error, OSError) and error.errno in SHORTAGES:
        return build_unavailable(Source.NVML, "NVML cannot be asked", error)
    message = f"reading NVML raised {error!r}: please report this with the driver's version"
    return Failure(source=Source.NVML, reason=Reason.DRIVER_ERROR, message=message)


Handle = Any
"""NVML's pointer to a device; valid until NVML is shut down or the device is lost."""

MOST_EVENTS: Final = 64
"""Events per poll, so that many of them do not keep the thread from reading memory."""

MOST_KINDS: Final = 128
"""Pairs of XID and instance counted per GPU, several times NVIDIA's catalogue; more, of a faulty driver, are OTHER."""
OTHER: Final = (0, pynvml.NVML_GPU_INSTANCE_ID_ANY)


class Xids:
    """Counts XID errors since its creation; listens from one init of NVML to the next.

    NVML reports the GPU of an event, in MIG mode also the GPU instance if known. It does not replay earlier events.
    """

    def __init__(self) -> None:
        self._counts: defaultdict[str, Counter[tuple[int, int]]] = defaultdict(Counter)
        self._uuids: dict[int, str] = {}
        self._events: Any = None

    def begin(self) -> None:
        """Create the set of events that `listen` adds to; without support, the counts stay empty."""
        self._uuids, self._events = {}, None
        with contextlib.suppress(pynvml.NVMLError):
            self._events = pynvml.nvmlEventSetCreate()

    def end(self) -> None:
        """Free the set, before NVML is shut down."""
        events, self._events = self._events, None
        if events is not None:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(events)

    def listen(self, handle: Handle, uuid: str) -> None:
        """Count the XID errors of this GPU from now on; raise NVMLError where the GPU has no such events."""
        if self._events is not None:
            pynvml.nvmlDeviceRegisterEvents(
                handle, pynvml.nvmlEventTypeXidCriticalError, self._events
            )
            self._uuids[_find_address(handle)] = uuid

    def poll(self) -> None:
        """Count the events that have arrived, without waiting for more."""
        if self._events is None or not self._uuids:
            return
        for _ in range(MOST_EVENTS):
            try:
                event = pynvml.nvmlEventSetWait_v2(self._events, 0)
            except pynvml.NVMLError:  # usually a timeout: nothing has arrived
                return
            uuid = self._uuids.get(_find_address(event.device))
            if uuid is not None:
                counts, kind = self._counts[uuid], (event.eventData, event.gpuInstanceId)
                counts[kind if kind in counts or len(counts) < MOST_KINDS else OTHER] += 1

    def counts(self, gpu_uuid: str, gpu_instance: int | None) -> tuple[tuple[int, int], ...]:
        """Return pairs of XID and count of a GPU or a MIG instance; events without an instance count for each."""
        counts: Counter[int] = Counter()
        for (xid, instance), count in tuple(self._counts.get(gpu_uuid, {}).items()):
            if gpu_instance is None or instance in (gpu_instance, pynvml.NVML_GPU_INSTANCE_ID_ANY):
                counts[xid] += count
        return tuple(sorted(counts.items()))


def _find_address(handle: Handle) -> int:
    # A lost GPU's handle must not be asked for its UUID; NVML uses one address per GPU.
    return ctypes.addressof(handle.contents)
