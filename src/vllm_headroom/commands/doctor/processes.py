"""Can the engine's processes be seen, and is their GPU memory told truly?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from msgspec.structs import replace

from vllm_headroom.commands.doctor.fixes import (
    NEWER_DRIVER,
    NODE,
    SAY_WHICH_PORT,
    SEE_HOST_PIDS,
    SEE_THE_PROCESSES,
    TRACE_THEM,
    Check,
    Fix,
    Status,
)
from vllm_headroom.commands.doctor.gpus import NO_NVML, called
from vllm_headroom.commands.doctor.look import Sight
from vllm_headroom.daemon.transitions import AMBIGUOUS
from vllm_headroom.derive.attribution import pids_are_true, process_memory_is_true
from vllm_headroom.derive.container import ContainerState, container
from vllm_headroom.derive.leftovers import of_no_gpu
from vllm_headroom.model import Failure, GpuReadings, ProcessReadings, Vendor
from vllm_headroom.scrape.proc.reader import HIDDEN
from vllm_headroom.units import gib
from vllm_headroom.vocabulary import HostBasis, Reason

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
