"""Which GPUs can be seen?"""

from __future__ import annotations

from typing import Final

from vllm_headroom.commands.doctor.fixes import ASK_KFD, Check, Status, gpu_fixes, nvml_fixes
from vllm_headroom.commands.doctor.look import Sight
from vllm_headroom.derive.leftovers import described
from vllm_headroom.model import Failure, GpuReading, Vendor
from vllm_headroom.units import gib

OF_OWNED_GPUS: Final = ("headroom_leak_*", "headroom_leaked_bytes", "headroom_memory_*", "headroom_time_to_oom_*")
"""What there is of the engine's GPUs only."""

WITHOUT_NVML: Final = ("headroom_gpu_*", *OF_OWNED_GPUS, "headroom_sample_skew_seconds")
NO_NVML: Final = "needs NVML, see nvml"


def nvml(sight: Sight) -> Check:
    """Tell whether NVML answers, and of which driver it is."""
    if isinstance(sight.readings, Failure):
        return Check(
            Status.MISSING,
            sight.readings.message,
            absent=WITHOUT_NVML,
            fixes=nvml_fixes(sight.readings.reason),
        )
    if all(device.vendor is Vendor.AMD for device in sight.readings.devices):
        text = "not needed: the GPUs are AMD's, whose driver tells of them in /sys"
        return Check(Status.NOT_APPLICABLE, text)
    version = sight.readings.driver_version
    text = f"NVML answers, driver {version}" if version else "NVML answers, and does not tell the driver's version"
    return Check(Status.OK, text)


def gpus(sight: Sight) -> Check:
    """Tell which GPUs are visible, and whether each can be read."""
    if isinstance(sight.readings, Failure):
        return Check(Status.UNKNOWN, NO_NVML)
    devices = sight.readings.devices
    details = tuple(
        f"{called(device)} {device.name}".rstrip() + _unified(device) + _trouble(device) for device in devices
    )
    details += tuple(
        f"{called(gpu.reading)}: {described(leftover)}" for gpu in sight.gpus for leftover in gpu.leftovers
    )
    unread = [device for device in devices if _trouble(device)]
    if not unread:
        return Check(Status.OK, f"{len(devices)} visible", details=details)
    failures = [device.failure.reason for device in unread if device.failure]
    untold = ASK_KFD if any(device.vendor is Vendor.AMD for device in unread) else ()
    return Check(
        Status.MISSING,
        f"{len(devices)} visible, of which {len(unread)} cannot be read",
        details=details,
        absent=tuple(f"headroom_gpu_memory_* of {called(device)}" for device in unread),
        fixes=gpu_fixes(failures[0]) if failures else untold,
    )


def called(device: GpuReading) -> str:
    """Return how a GPU is called; one that never opened has no UUID."""
    return f"GPU {device.index} ({device.uuid or 'UUID not known'})"


def _trouble(device: GpuReading) -> str:
    if device.failure is not None:
        return f": {device.failure.message}"
    if device.memory is not None:
        return ""
    if device.vendor is Vendor.AMD:
        return (
            ": what its processes may take of its memory or the machine's is not told by KFD, or not to this container"
        )
    return ": NVML tells no memory of it"


def _unified(device: GpuReading) -> str:
    """Say where a GPU has no memory of its own, so that nothing but the machine's swap stands between it and a hang."""
    if device.memory is None or not device.memory.unified:
        return ""
    total, free = gib(device.memory.total_bytes), gib(device.memory.free_bytes)
    return f", unified memory: {free} left of the {total} that it may take of the machine's, by /proc/meminfo"
