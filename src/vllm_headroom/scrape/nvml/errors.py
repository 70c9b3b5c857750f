"""What NVML's errors mean to the operator."""

from collections.abc import Mapping
from typing import Final

import pynvml

from vllm_headroom.model import Failure
from vllm_headroom.scrape.shortage import SHORTAGES, build_unavailable
from vllm_headroom.vocabulary import Reason, Source

DRIVER_WIDE_CODES: Final = frozenset(
    {
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    }
)
"""The error codes after which no device can be read until NVML is reinitialised."""

LOST_CODES: Final = frozenset(
    {
        pynvml.NVML_ERROR_GPU_IS_LOST,
        pynvml.NVML_ERROR_RESET_REQUIRED,
        pynvml.NVML_ERROR_GPU_NOT_FOUND,
    }
)
"""The error codes after which the device's handle must not be used again. Using it has crashed
processes (XuehaiPan/nvitop#139, #145).
"""

BLOCKED_CODES: Final = frozenset({pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_OPERATING_SYSTEM})
"""The error codes of a device whose device node is not accessible
(NVIDIA/nvidia-container-toolkit#48). Healthy devices sometimes return these codes too.
"""

_SOURCE_REASONS: Final = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: Reason.LIBRARY_MISSING,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: Reason.DRIVER_MISSING,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: Reason.VERSION_MISMATCH,
    pynvml.NVML_ERROR_NO_PERMISSION: Reason.NO_PERMISSION,
    pynvml.NVML_ERROR_NOT_FOUND: Reason.NO_DEVICES,
    pynvml.NVML_ERROR_GPU_NOT_FOUND: Reason.NO_DEVICES,
    **dict.fromkeys(BLOCKED_CODES, Reason.UNKNOWN),
}
_IN_LOG: Final = "in the node's kernel log"
_SOURCE_MESSAGES: Final = {
    Reason.LIBRARY_MISSING: (
        "libnvidia-ml.so.1 cannot be loaded here: a machine needs NVIDIA's driver, a container the"
        " nvidia runtime (runtimeClassName: nvidia), NVIDIA_VISIBLE_DEVICES and"
        " NVIDIA_DRIVER_CAPABILITIES=utility"
    ),
    Reason.DRIVER_MISSING: (
        "the NVIDIA driver is not loaded on this node: load it, or move the pod to a node with GPUs"
    ),
    Reason.VERSION_MISMATCH: (
        "the NVIDIA library in this container is not of the loaded driver's version, as after a"
        " driver upgrade: restart the container, and reboot the node if that does not help"
    ),
    Reason.NO_PERMISSION: (
        "this user may not use NVML: let the container's user open /dev/nvidiactl"
    ),
    Reason.NO_DEVICES: (
        "NVML shows no GPU here: set NVIDIA_VISIBLE_DEVICES of this container to all or to the"
        " engine's GPUs"
    ),
    Reason.TIMEOUT: (
        f"NVML does not answer: look for NVRM and Xid lines {_IN_LOG}, and reboot the node if it"
        " stays so"
    ),
    Reason.UNKNOWN: (
        "NVML fails on every GPU: if it stays so, the container has lost its devices (restart it)"
        f" or the driver is ill (look for NVRM lines {_IN_LOG})"
    ),
    Reason.DRIVER_ERROR: (f"NVML fails for now and is tried again: look for NVRM lines {_IN_LOG}"),
}
_DEVICE_REASONS: Final = {
    **dict.fromkeys(LOST_CODES, Reason.DEVICE_LOST),
    pynvml.NVML_ERROR_NO_PERMISSION: Reason.NO_PERMISSION,
    pynvml.NVML_ERROR_TIMEOUT: Reason.TIMEOUT,
    **dict.fromkeys(BLOCKED_CODES, Reason.UNKNOWN),
}
_DEVICE_MESSAGES: Final = {
    Reason.DEVICE_LOST: (
        f"the GPU is lost: look for Xid lines {_IN_LOG}, then reset the GPU or reboot the node"
    ),
    Reason.TIMEOUT: (
        f"the GPU does not answer: look for Xid lines {_IN_LOG}, and reset the GPU if it stays so"
    ),
    Reason.NO_PERMISSION: (
        "this container may not open the GPU: leave it out of NVIDIA_VISIBLE_DEVICES, or give the"
        " container access"
    ),
    Reason.UNKNOWN: (
        "the GPU cannot be read: if it stays so, restart the container, then look into the node's"
        " kernel log"
    ),
    Reason.DRIVER_ERROR: f"the GPU cannot be read: look for NVRM and Xid lines {_IN_LOG}",
}


def explain_source(cause: Reason | int) -> Failure:
    """Return the failure of NVML as a whole.

    `cause` is a reason or an NVML error code.
    """
    return _explain(cause, _SOURCE_REASONS, _SOURCE_MESSAGES)


def explain_device(cause: Reason | int) -> Failure:
    """Return the failure of one device, given a reason or an NVML error code."""
    return _explain(cause, _DEVICE_REASONS, _DEVICE_MESSAGES)


def _explain(
    cause: Reason | int, reasons: Mapping[int, Reason], messages: Mapping[Reason, str]
) -> Failure:
    """Return the failure for a reason or an NVML error code. Unknown codes map to DRIVER_ERROR."""
    if isinstance(cause, Reason):
        return Failure(source=Source.NVML, reason=cause, message=messages[cause])
    reason = reasons.get(cause, Reason.DRIVER_ERROR)
    return Failure(
        source=Source.NVML, reason=reason, message=f"{messages[reason]} (NVML error {cause})"
    )


def explain_unexpected(error: Exception) -> Failure:
    """Return the failure for an error not raised by NVML.

    Either the daemon has a bug, or it has run out of a resource such as file descriptors.
    """
    if isinstance(error, OSError) and error.errno in SHORTAGES:
        return build_unavailable(Source.NVML, "NVML cannot be asked", error)
    message = f"reading NVML raised {error!r}: please report this with the driver's version"
    return Failure(source=Source.NVML, reason=Reason.DRIVER_ERROR, message=message)
