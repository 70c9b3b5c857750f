"""Which GPUs can be seen?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from msgspec.structs import replace

from vllm_headroom.daemon.transitions import AMBIGUOUS, NOT_ATTRIBUTED
from vllm_headroom.derive.attribution import Selection, described, of_no_gpu, pids_are_true, process_memory_is_true
from vllm_headroom.derive.host_memory import ContainerState, container
from vllm_headroom.model import Failure, GpuReading, GpuReadings, ProcessReadings, Vendor
from vllm_headroom.scrape.proc.reader import HIDDEN
from vllm_headroom.units import gib
from vllm_headroom.vocabulary import Attribution, HostBasis, Reason
from vllm_headroom_tools.doctor.fixes import (
    ASK_KFD,
    NEWER_DRIVER,
    NODE,
    SAY_WHICH_PORT,
    SEE_HOST_PIDS,
    SEE_THE_GPUS,
    SEE_THE_PROCESSES,
    TRACE_THEM,
    Check,
    Fix,
    Sight,
    Status,
    gpu_fixes,
    nvml_fixes,
    setting,
)

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


WITHOUT_HOLDERS: Final = ('headroom_gpu_memory_held_bytes{holder="engine"|"other"}',)
WITHOUT_PROCESSES: Final = ("headroom_host_*", *WITHOUT_HOLDERS)
NO_LIMIT: Final = ", of a limit that is not known (HEADROOM_HOST_MEMORY_LIMIT_BYTES tells it),"
BASES: Final[Mapping[HostBasis | None, str]] = {
    HostBasis.CGROUP: "by the cgroup of vLLM's processes",
    HostBasis.MACHINE: "by the machine, since their cgroup has no limit",
    HostBasis.PROCESSES: "by what its processes hold themselves and their /dev/shm, since their cgroup is not seen",
}
NO_PROC: Final = "needs the processes, see processes"
SHOW_PROC: Final = Fix(where="in the systemd unit", lines=("ProtectProc=default", "ProcSubset=all"))
STUCK: Final = Fix(where=f"{NODE}, to find them", lines=("ps -eo pid,stat,wchan:32,args | awk '$2 ~ /^D/'",))
ON_ITS_MACHINE: Final = Fix(where="on the machine where vLLM runs", lines=("vllm-headroom doctor",))
ASK_THE_NODE: Final = Fix(
    where=f"{NODE}, whether it tells", lines=("nvidia-smi --query-compute-apps=pid,used_memory --format=csv",)
)


def processes(sight: Sight) -> Check:
    """Tell whether the engine's processes are seen, which they are only where the PID namespace is shared."""
    found = sight.processes
    if isinstance(found, Failure):
        return _without(Status.MISSING, found.message, *_fixes(found))
    check, left = _seen(sight, found), of_no_gpu(found.left_behind, sight.gpus)
    return check if left is None else replace(check, details=(*check.details, left))


def _seen(sight: Sight, found: ProcessReadings) -> Check:
    if found.engine:
        roles = Counter(str(process.role) for process in found.engine)
        counted = ", ".join(f"{count} {role}" for role, count in sorted(roles.items()))
        text = f"vLLM's are seen ({counted}), in {_namespace(found)}"
        return Check(Status.OK, text, details=tuple(_host(sight, found)))
    if found.ambiguous_roots:
        return _without(Status.MISSING, AMBIGUOUS, *SAY_WHICH_PORT)
    place = f"among the {len(found.visible_pids)} seen in {_namespace(found)}"
    if isinstance(sight.page, Failure):
        text = f"vLLM's are not {place}; it does not answer, so it may not be running"
        return _without(Status.UNKNOWN, text, *(() if found.sees_host_pids else SEE_THE_PROCESSES))
    text = f"vLLM answers, but its processes are not {place}"
    if found.sees_host_pids:
        other = "it runs on another machine, or other users' processes are hidden from this one"
        return _without(Status.MISSING, f"{text}: {other}", ON_ITS_MACHINE, SHOW_PROC)
    return _without(Status.MISSING, f"{text}, which is not shared with vLLM's container", *SEE_THE_PROCESSES)


def _host(sight: Sight, found: ProcessReadings) -> Iterator[str]:
    """Yield what is known of the host memory and how, and whether there is swap, which puts off the end."""
    memory = container(ContainerState(), found, limit_bytes=sight.host_limit_bytes)[1]
    if memory is not None and memory.used_bytes is not None:
        limit = NO_LIMIT if memory.limit_bytes is None else f" of {gib(memory.limit_bytes)}"
        yield f"host memory: {gib(memory.used_bytes)}{limit} in use, {BASES[memory.basis]}"
    machine = found.host.machine
    if machine is not None and machine.swap_bytes:
        used = gib(machine.swap_bytes - machine.swap_free_bytes)
        yield f"swap, zram included: {used} of {gib(machine.swap_bytes)} in use; no time to out-of-memory counts on it"


def process_memory(sight: Sight) -> Check:
    """Tell whether the memory that this driver tells of a process is that process's, seen from here."""
    readings, found = sight.readings, sight.processes
    if isinstance(readings, Failure):
        return Check(Status.UNKNOWN, NO_NVML)
    if isinstance(found, Failure):
        return Check(Status.UNKNOWN, NO_PROC)
    driver = readings.driver_version
    of_amd = [device for device in readings.devices if device.vendor is Vendor.AMD]
    if driver is None and not found.sees_host_pids and not of_amd:
        return Check(Status.UNKNOWN, "the driver does not tell its version")
    if not process_memory_is_true(readings, found):
        is_its_pid = pids_are_true(readings, found)
        what = "may tell another process's memory" if is_its_pid else "tells the host's pids, which are others here"
        return Check(
            Status.MISSING,
            f"outside the machine's first PID namespace, driver {driver} {what}: the daemon does not use it,"
            " and takes all that is in use on the engine's GPUs for the engine's",
            absent=WITHOUT_HOLDERS,
            fixes=(NEWER_DRIVER, SEE_HOST_PIDS),
        )
    untold = _untold(readings, found)
    if untold:
        text = f"the memory of each process is not told on {', '.join(untold)}"
        fixes = (*TRACE_THEM, SEE_HOST_PIDS) if of_amd else (ASK_THE_NODE,)
        return Check(Status.MISSING, text, absent=WITHOUT_HOLDERS, fixes=fixes)
    told = "AMD's driver" if driver is None and of_amd else f"driver {driver or 'of a version not told'}"
    text = f"{told} tells each process's own memory, seen from {_namespace(found)}"
    return Check(Status.OK, text)


def _without(state: Status, text: str, *fixes: Fix) -> Check:
    return Check(state, text, absent=WITHOUT_PROCESSES, fixes=fixes)


def _fixes(failure: Failure) -> tuple[Fix, ...]:
    if failure == HIDDEN:
        return *SEE_THE_PROCESSES, SHOW_PROC
    return (STUCK if failure.reason is Reason.TIMEOUT else SHOW_PROC,)


def _namespace(found: ProcessReadings) -> str:
    return "the machine's first PID namespace" if found.sees_host_pids else "a container's PID namespace"


def _untold(readings: GpuReadings, found: ProcessReadings) -> list[str]:
    engine = {process.pid for process in found.engine}
    return [
        called(device)
        for device in readings.devices
        if device.failure is None
        and (device.processes is None or any(p.used_bytes is None for p in device.processes if p.pid in engine))
    ]


HOW: Final = {
    Attribution.PROCESS: "the engine's (process: one of its processes is on it)",
    Attribution.UUID: "the engine's (uuid: HEADROOM_GPUS names it)",
    Attribution.SINGLE: "taken for the engine's (single: no other is visible)",
    Attribution.ASSUMED: "taken for the engine's (assumed: HEADROOM_GPUS is all)",
    None: "not taken for the engine's",
}
ALONE: Final = "the only visible GPU is taken for the engine's, but none of the engine's processes is on it"
NOT_ON_ANY: Final = (
    "none of the engine's processes is on a visible GPU: it is still starting, or uses GPUs that this container does"
    " not see"
)
NOT_ON_THOSE_READ: Final = (
    "none of the engine's processes is on a GPU that can be read; they may be on one that cannot, see gpus"
)
NOT_LISTED: Final = (
    "the engine's processes are seen, but what this driver lists on the GPUs cannot be matched with them in a container"
)
NOT_TRACED: Final = (
    "the engine's processes are seen, but not what they have open, which alone tells a container who is on AMD's cards"
)
DOWN: Final = "needs the engine to run, see engine"


def gpu_attribution(sight: Sight, selection: Selection) -> Check:
    """Tell which GPUs are taken for the engine's, how that came, and why it is none."""
    if isinstance(sight.readings, Failure):
        return Check(Status.UNKNOWN, NO_NVML)
    return replace(
        _judged(sight, selection),
        details=tuple(f"{called(gpu.reading)} {HOW[gpu.attribution]}" for gpu in sight.gpus),
        absent=() if any(gpu.attribution for gpu in sight.gpus) else OF_OWNED_GPUS,
    )


def _judged(sight: Sight, selection: Selection) -> Check:
    owned = [gpu for gpu in sight.gpus if gpu.attribution]
    names = {name.casefold() for gpu in sight.gpus for name in (gpu.reading.uuid, str(gpu.reading.index))}
    invisible = [name for name in selection.listed if name.casefold() not in names]
    if invisible:
        text = f"HEADROOM_GPUS names GPUs that are not visible: {', '.join(invisible)}"
        return Check(Status.MISSING, text, fixes=(_named(sight), *SEE_THE_GPUS))
    if others := [gpu for gpu in sight.gpus if gpu.left_out]:
        shown = ", ".join(called(gpu.reading) for gpu in others)
        text = f"HEADROOM_GPUS leaves out GPUs that the engine's processes are on: {shown}"
        return Check(
            Status.MISSING, text, fixes=(setting("# leave HEADROOM_GPUS out: the engine's processes tell its GPUs"),)
        )
    if not owned:
        return _none(sight)
    is_up = not isinstance(sight.page, Failure)
    if owned[0].attribution is Attribution.SINGLE and is_up and _could_be_told(sight):  # and they are not on it
        return Check(Status.UNKNOWN, ALONE, fixes=(_named(sight), *SEE_THE_GPUS))
    return Check(Status.OK, f"{len(owned)} of {len(sight.gpus)} taken for the engine's")


def _could_be_told(sight: Sight) -> bool:
    """Tell whether a process of the engine on a visible GPU would have been found on it."""
    if isinstance(sight.processes, Failure) or not sight.processes.engine:
        return False
    return _pids_are_true(sight) and all(gpu.reading.processes is not None for gpu in sight.gpus)


def _pids_are_true(sight: Sight) -> bool:
    return not isinstance(sight.readings, Failure) and pids_are_true(sight.readings, sight.processes)


def _none(sight: Sight) -> Check:
    """Return why automatic attribution took none of several GPUs."""
    processes, name_them = sight.processes, _named(sight)
    if isinstance(processes, Failure):
        share = SEE_THE_PROCESSES if processes == HIDDEN else ()
        return Check(Status.MISSING, NOT_ATTRIBUTED, fixes=(*share, name_them))
    if processes.ambiguous_roots:
        return Check(Status.MISSING, AMBIGUOUS, fixes=(*SAY_WHICH_PORT, name_them))
    if isinstance(sight.page, Failure):
        return Check(Status.UNKNOWN, DOWN, fixes=(name_them,))
    if not processes.engine:
        share = () if processes.sees_host_pids else SEE_THE_PROCESSES
        return Check(Status.MISSING, NOT_ATTRIBUTED, fixes=(*share, name_them))
    if _could_be_told(sight):
        return Check(Status.MISSING, NOT_ON_ANY, fixes=(*SEE_THE_GPUS, name_them))
    return _unmatched(sight, name_them)


def _unmatched(sight: Sight, name_them: Fix) -> Check:
    """Return why the engine's processes are not found on GPUs though they are seen."""
    if any(gpu.reading.failure for gpu in sight.gpus) and _pids_are_true(sight):
        return Check(Status.MISSING, NOT_ON_THOSE_READ, fixes=(name_them,))
    if any(gpu.reading.vendor is Vendor.AMD and gpu.reading.processes is None for gpu in sight.gpus):
        return Check(Status.MISSING, NOT_TRACED, fixes=(*TRACE_THEM, SEE_HOST_PIDS, name_them))
    return Check(Status.MISSING, NOT_LISTED, fixes=(NEWER_DRIVER, SEE_HOST_PIDS, name_them))


def _named(sight: Sight) -> Fix:
    devices = [gpu.reading for gpu in sight.gpus]
    whole = Counter(device.index for device in devices if not device.uuid.startswith("MIG-"))
    names = [str(device.index) if whole[device.index] == 1 else device.uuid for device in devices]
    return setting(f"HEADROOM_GPUS={','.join(names)}  # leave out those that the engine does not use")
