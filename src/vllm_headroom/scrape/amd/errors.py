"""What it means to the operator that an AMD card cannot be read."""

from __future__ import annotations

import errno
from typing import Final

from vllm_headroom.model import Failure
from vllm_headroom.vocabulary import Reason, Source

_REASONS: Final = {
    errno.ENODEV: Reason.DEVICE_LOST,
    errno.ENOENT: Reason.DEVICE_LOST,
    errno.EACCES: Reason.NO_PERMISSION,
    errno.EPERM: Reason.NO_PERMISSION,
}
_MESSAGES: Final = {
    Reason.DEVICE_LOST: (
        "the GPU is lost: look for amdgpu lines in the node's kernel log, then reset the GPU or reboot the node"
    ),
    Reason.NO_PERMISSION: (
        "this user may not read the GPU's memory in /sys: show /sys to this container as every container sees it"
    ),
    Reason.TIMEOUT: (
        "the GPU does not answer: look for amdgpu lines in the node's kernel log, and reset the GPU if it stays so"
    ),
    Reason.DRIVER_ERROR: "the GPU cannot be read: look for amdgpu lines in the node's kernel log",
}


def failure(reason: Reason, error: OSError | None = None) -> Failure:
    """Return the failure of one card, with what the kernel said."""
    suffix = "" if error is None else f" ({error.strerror or error})"
    return Failure(source=Source.NVML, reason=reason, message=_MESSAGES[reason] + suffix)


def failure_of(error: OSError) -> Failure:
    """Return what it means that a card's file could not be read."""
    return failure(_REASONS.get(error.errno or 0, Reason.DRIVER_ERROR), error)
