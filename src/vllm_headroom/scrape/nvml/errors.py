"""What NVML's error codes mean to the operator."""

from __future__ import annotations

from typing import Final

import pynvml

from vllm_headroom.model import Failure
from vllm_headroom.scrape.shortage import SHORTAGES, unavailable
from vllm_headroom.vocabulary import Reason, Source

DRIVER_WIDE: Final = frozenset(
    {
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    }
)
"""No device can be read before NVML is initialised anew."""

LOST: Final = frozenset(
    {pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED, pynvml.NVML_ERROR_GPU_NOT_FOUND}
)
"""This device's handle must not be used again: doing so has crashed processes (XuehaiPan/nvitop#139, #145)."""

BLOCKED: Final = frozenset({pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_OPERATING_SYSTEM})
"""What a device answers whose node in /dev is out of reach, as after `systemctl daemon-reload`
(NVIDIA/nvidia-container-toolkit#48); but single calls have given it on healthy devices too.
"""

NEVER_ANSWERED: Final = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    }
)
"""This device will not answer this call, however often it is asked."""

_SOURCE_REASONS: Final = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: Reason.LIBRARY_MISSING,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: Reason.DRIVER_MISSING,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: Reason.VERSION_MISMATCH,
    pynvml.NVML_ERROR_NO_PERMISSION: Reason.NO_PERMISSION,
    pynvml.NVML_ERROR_NOT_FOUND: Reason.NO_DEVICES,
    pynvml.NVML_ERROR_GPU_NOT_FOUND: Reason.NO_DEVICES,
    **dict.fromkeys(BLOCKED, Reason.UNKNOWN),
}
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
    Reason.TIMEOUT: (
        "NVML does not answer: look for NVRM and Xid lines in the node's kernel log, and reboot the node if it stays so"
    ),
    Reason.UNKNOWN: (
        "NVML fails on every GPU: if it stays so, the container has lost its devices (restart it) or the driver is ill"
        " (look for NVRM lines in the node's kernel log)"
    ),
    Reason.DRIVER_ERROR: "NVML fails for now and is tried again: look for NVRM lines in the node's kernel log",
}
_DEVICE_REASONS: Final = {
    **dict.fromkeys(LOST, Reason.DEVICE_LOST),
    pynvml.NVML_ERROR_NO_PERMISSION: Reason.NO_PERMISSION,
    pynvml.NVML_ERROR_TIMEOUT: Reason.TIMEOUT,
    **dict.fromkeys(BLOCKED, Reason.UNKNOWN),
}
_DEVICE_MESSAGES: Final = {
    Reason.DEVICE_LOST: (
        "the GPU is lost: look for Xid lines in the node's kernel log, then reset the GPU or reboot the node"
    ),
    Reason.TIMEOUT: (
        "the GPU does not answer: look for Xid lines in the node's kernel log, and reset the GPU if it stays so"
    ),
    Reason.NO_PERMISSION: (
        "this container may not open the GPU: leave it out of NVIDIA_VISIBLE_DEVICES, or give the container access"
    ),
    Reason.UNKNOWN: (
        "the GPU cannot be read: if it stays so, restart the container, then look into the node's kernel log"
    ),
    Reason.DRIVER_ERROR: "the GPU cannot be read: look for NVRM and Xid lines in the node's kernel log",
}


def source_failure(reason: Reason, code: int | None = None) -> Failure:
    """Return the failure of NVML as a whole, with NVML's error code where it gave one."""
    return _failure(reason, _SOURCE_MESSAGES[reason], code)


def source_failure_of(code: int) -> Failure:
    """Return the failure that `code` means for NVML as a whole."""
    return source_failure(_SOURCE_REASONS.get(code, Reason.DRIVER_ERROR), code)


def device_failure(reason: Reason, code: int | None = None) -> Failure:
    """Return the failure of one device, with NVML's error code where it gave one."""
    return _failure(reason, _DEVICE_MESSAGES[reason], code)


def device_failure_of(code: int) -> Failure:
    """Return the failure that `code` means for one device."""
    return device_failure(_DEVICE_REASONS.get(code, Reason.DRIVER_ERROR), code)


def unexpected(error: Exception) -> Failure:
    """Return the failure for an error that is not NVML's: this side is short of something, or nobody knows it."""
    if isinstance(error, OSError) and error.errno in SHORTAGES:
        return unavailable(Source.NVML, "NVML cannot be asked", error)
    message = f"reading NVML raised {error!r}: please report this with the driver's version"
    return _failure(Reason.DRIVER_ERROR, message, None)


def _failure(reason: Reason, message: str, code: int | None) -> Failure:
    suffix = "" if code is None else f" (NVML error {code})"
    return Failure(source=Source.NVML, reason=reason, message=message + suffix)
