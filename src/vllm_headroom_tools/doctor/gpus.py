"""Which GPUs can be seen?"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from vllm_headroom.daemon.transitions import AMBIGUOUS, NOT_ATTRIBUTED
from vllm_headroom.derive.attribution import (
    Selection,
    are_pids_true,
    describe_leftover,
    describe_orphans,
    is_process_memory_true,
)
from vllm_headroom.derive.host_memory import ContainerState, update_container
from vllm_headroom.model import Failure, GpuReading, ProcessReadings, Vendor
from vllm_headroom.scrape.proc.reader import HIDDEN
from vllm_headroom.units import format_gib
from vllm_headroom.vocabulary import Attribution, HostBasis, Reason
from vllm_headroom_tools.doctor import fixes
from vllm_headroom_tools.doctor.fixes import Check, Fix, Status, Survey, fix_setting, put

OWNED_GPU_SERIES: Final = (
    "headroom_engine_unused_bytes",
    "headroom_leak_bytes_*",
    "headroom_leak_location",
    "headroom_leak_state",
    "headroom_leaked_bytes",
    "headroom_memory_*_bytes",
    "headroom_memory_discrepancy_ratio",
    "headroom_memory_per_*",
    "headroom_time_to_oom_*",
)
"""Series that exist for the engine's GPUs only."""

WITHOUT_NVML: Final = ("headroom_gpu_*", *OWNED_GPU_SERIES, "headroom_sample_skew_seconds")
NO_NVML: Final = "needs NVML, see nvml"


def check_nvml(survey: Survey) -> Check:
    """Check whether NVML answers, and with which driver."""
    found = survey.readings
    if isinstance(found, Failure):
        ways = fixes.NVML.get(found.reason, (fixes.KERNEL_LOG,))
        return Check(Status.MISSING, found.message, absent=WITHOUT_NVML, fixes=ways)
    if all(device.vendor is Vendor.AMD for device in found.devices):
        return Check(
            Status.NOT_APPLICABLE,
            "not needed: the GPUs are AMD's, whose driver reports them in /sys",
        )
    version = (
        f"driver {found.driver_version}"
        if found.driver_version
        else "and does not report the driver's version"
    )
    return Check(Status.OK, f"NVML answers, {version}")


def check_gpus(survey: Survey) -> Check:
    """Check which GPUs are visible, and whether each can be read."""
    if isinstance(survey.readings, Failure):
        return Check(Status.UNKNOWN, NO_NVML)
    devices = survey.readings.devices
    details = (
        *(
            f"{name_device(device)} {device.name}".rstrip() + _describe_memory(device)
            for device in devices
        ),
        *(
            f"{name_device(gpu.reading)}: {describe_leftover(left)}"
            for gpu in survey.gpus
            for left in gpu.leftovers
        ),
    )
    unread = [device for device in devices if device.failure or device.memory is None]
    if not unread:
        return Check(Status.OK, f"{len(devices)} visible", details=details)
    failures = [device.failure.reason for device in unread if device.failure]
    ways: tuple[Fix, ...] = (
        fixes.ASK_KFD if any(device.vendor is Vendor.AMD for device in unread) else ()
    )
    if failures:
        ways = fixes.SEE_THE_GPUS if failures[0] is Reason.NO_PERMISSION else (fixes.KERNEL_LOG,)
    return Check(
        Status.MISSING,
        f"{len(devices)} visible, of which {len(unread)} cannot be read",
        details=details,
        absent=tuple(f"headroom_gpu_memory_* of {name_device(device)}" for device in unread),
        fixes=ways,
    )


def name_device(device: GpuReading) -> str:
    """Return a GPU's name; one that never opened has no UUID."""
    return f"GPU {device.index} ({device.uuid or 'UUID not known'})"


def _describe_memory(device: GpuReading) -> str:
    """Return why it is not known, or what a GPU shares with its machine: only swap separates that from a hang."""
    if device.failure is not None:
        return f": {device.failure.message}"
    if device.memory is None and device.vendor is Vendor.AMD:
        what = "KFD does not report what its processes may use of its memory or the machine's"
        return f": {what}, or not to this container"
    if device.memory is None:
        return ": NVML reports no memory for it"
    if not device.memory.is_unified:
        return ""
    total, free = format_gib(device.memory.total_bytes), format_gib(device.memory.free_bytes)
    return f", unified memory: {free} left of the {total} that it may take of the machine's, by /proc/meminfo"


WITHOUT_HOLDERS: Final = ('headroom_gpu_memory_held_bytes{holder="engine"|"other"}',)
WITHOUT_PROCESSES: Final = (
    "headroom_host_*",
    "headroom_leak_bound_bytes",
    "headroom_memory_pressure_ratio",
    *WITHOUT_HOLDERS,
)
BASES: Final[Mapping[HostBasis | None, str]] = {
    HostBasis.CGROUP: "by the cgroup of vLLM's processes",
    HostBasis.MACHINE: "by the machine, since their cgroup has no limit",
    HostBasis.PROCESSES: "by what its processes hold themselves and their /dev/shm, since their cgroup is not seen",
}
SHOW_PROC: Final = put("in the systemd unit", "ProtectProc=default", "ProcSubset=all")
STUCK: Final = put(f"{fixes.NODE}, to find them", "ps -eo pid,stat,wchan:32,args | awk '$2 ~ /^D/'")
ON_ITS_MACHINE: Final = put("on the machine where vLLM runs", "vllm-headroom doctor")
ASK_THE_NODE: Final = put(
    f"{fixes.NODE}, to see whether the driver reports it",
    "nvidia-smi --query-compute-apps=pid,used_memory --format=csv",
)


def check_processes(survey: Survey) -> Check:
    """Check whether the engine's processes are seen, which needs a shared PID namespace."""
    found, share = survey.processes, fixes.SEE_THE_PROCESSES
    if isinstance(found, Failure):
        ways = (
            *(share if found == HIDDEN else ()),
            STUCK if found.reason is Reason.TIMEOUT else SHOW_PROC,
        )
        return Check(Status.MISSING, found.message, absent=WITHOUT_PROCESSES, fixes=ways)
    namespace = _name_namespace(found)
    state, ways, details = Status.MISSING, share, []
    if found.engine:
        counted = fixes.count_roles(process.role for process in found.engine)
        state, ways, details = Status.OK, (), [*_describe_host(survey, found)]
        text = f"vLLM's are seen ({counted}), in {namespace}"
    elif found.ambiguous_engines:
        text, ways = AMBIGUOUS, fixes.SAY_WHICH_PORT
    elif isinstance(survey.page, Failure):
        text = f"vLLM's are not among the {len(found.visible_pids)} seen in {namespace}; it does not answer, so it may"
        state, text, ways = (
            Status.UNKNOWN,
            f"{text} not be running",
            () if found.sees_host_pids else share,
        )
    else:
        text = f"vLLM answers, but its processes are not among the {len(found.visible_pids)} seen in {namespace}"
        if found.sees_host_pids:
            text += (
                ": it runs on another machine, or other users' processes are hidden from this one"
            )
            ways = (ON_ITS_MACHINE, SHOW_PROC)
        else:
            text += ", which is not shared with vLLM's container"
    if left := describe_orphans(found.left_behind, survey.gpus):
        details.append(left)
    return Check(
        state,
        text,
        details=tuple(details),
        absent=() if found.engine else WITHOUT_PROCESSES,
        fixes=tuple(ways),
    )


def _describe_host(survey: Survey, found: ProcessReadings) -> Iterator[str]:
    """Yield what is known of the host memory and how, and whether there is swap, which delays an out-of-memory."""
    memory = update_container(ContainerState(), found, limit_bytes=survey.host_limit_bytes)[1]
    if memory is not None and memory.used_bytes is not None:
        limit = ", of a limit that is not known (HEADROOM_HOST_MEMORY_LIMIT_BYTES sets it),"
        limit = limit if memory.limit_bytes is None else f" of {format_gib(memory.limit_bytes)}"
        yield f"host memory: {format_gib(memory.used_bytes)}{limit} in use, {BASES[memory.basis]}"
    machine = found.host.machine
    if machine is not None and machine.swap_bytes:
        used = f"{format_gib(machine.swap_bytes - machine.swap_free_bytes)} of {format_gib(machine.swap_bytes)}"
        yield f"swap, zram included: {used} in use; no time to out-of-memory counts on it"


def check_process_memory(survey: Survey) -> Check:
    """Check whether this driver reports each process's own memory, as seen from here."""
    readings, found = survey.readings, survey.processes
    if isinstance(readings, Failure):
        return Check(Status.UNKNOWN, NO_NVML)
    if isinstance(found, Failure):
        return Check(Status.UNKNOWN, "needs the processes, see processes")
    driver = readings.driver_version
    of_amd = [device for device in readings.devices if device.vendor is Vendor.AMD]
    if driver is None and not found.sees_host_pids and not of_amd:
        return Check(Status.UNKNOWN, "the driver does not report its version")
    if not is_process_memory_true(readings, found):
        is_its_pid = are_pids_true(readings, found)
        what = (
            "may report another process's memory"
            if is_its_pid
            else "reports the host's pids, which differ here"
        )
        return Check(
            Status.MISSING,
            f"outside the machine's first PID namespace, driver {driver} {what}: the daemon does not use it,"
            " and attributes all memory in use on the engine's GPUs to the engine",
            absent=WITHOUT_HOLDERS,
            fixes=(fixes.NEWER_DRIVER, fixes.SEE_HOST_PIDS),
        )
    engine = {process.pid for process in found.engine}
    unreported = [
        name_device(device)
        for device in readings.devices
        if device.failure is None
        and (
            device.processes is None
            or any(p.used_bytes is None for p in device.processes if p.pid in engine)
        )
    ]
    if unreported:
        text = f"the driver does not report the memory of each process on {', '.join(unreported)}"
        ways = (*fixes.TRACE_THEM, fixes.SEE_HOST_PIDS) if of_amd else (ASK_THE_NODE,)
        return Check(Status.MISSING, text, absent=WITHOUT_HOLDERS, fixes=ways)
    source = (
        "AMD's driver" if driver is None and of_amd else f"driver {driver or 'of unknown version'}"
    )
    return Check(
        Status.OK,
        f"{source} reports each process's own memory, as seen from {_name_namespace(found)}",
    )


def _name_namespace(found: ProcessReadings) -> str:
    return (
        "the machine's first PID namespace"
        if found.sees_host_pids
        else "a container's PID namespace"
    )


ATTRIBUTIONS: Final = {
    Attribution.PROCESS: "the engine's (process: one of its processes is on it)",
    Attribution.UUID: "the engine's (uuid: HEADROOM_GPUS names it)",
    Attribution.SINGLE: "attributed to the engine (single: no other is visible)",
    Attribution.ASSUMED: "attributed to the engine (assumed: HEADROOM_GPUS is all)",
    None: "not attributed to the engine",
}


def check_gpu_attribution(survey: Survey, selection: Selection) -> Check:
    """Check which GPUs are attributed to the engine, how, and why none is."""
    if isinstance(survey.readings, Failure):
        return Check(Status.UNKNOWN, NO_NVML)
    gpus, state = survey.gpus, Status.MISSING
    ways: tuple[Fix, ...] = (_name_gpus(survey), *fixes.SEE_THE_GPUS)
    owned = [gpu for gpu in gpus if gpu.attribution]
    names = {name.casefold() for gpu in gpus for name in (gpu.reading.uuid, str(gpu.reading.index))}
    is_up = not isinstance(survey.page, Failure)
    if invisible := [name for name in selection.listed if name.casefold() not in names]:
        text = f"HEADROOM_GPUS names GPUs that are not visible: {', '.join(invisible)}"
    elif others := [name_device(gpu.reading) for gpu in gpus if gpu.is_left_out]:
        text = (
            f"HEADROOM_GPUS leaves out GPUs that the engine's processes are on: {', '.join(others)}"
        )
        ways = (fix_setting("# remove HEADROOM_GPUS: the engine's processes show its GPUs"),)
    elif not owned:
        state, text, ways = _explain_none(survey)
    elif (
        owned[0].attribution is Attribution.SINGLE and is_up and _can_match(survey)
    ):  # and they are not on it
        state = Status.UNKNOWN
        text = "the only visible GPU is attributed to the engine, but none of the engine's processes is on it"
    else:
        state, text, ways = Status.OK, f"{len(owned)} of {len(gpus)} attributed to the engine", ()
    return Check(
        state,
        text,
        details=tuple(
            f"{name_device(gpu.reading)} {ATTRIBUTIONS[gpu.attribution]}" for gpu in gpus
        ),
        absent=() if owned else OWNED_GPU_SERIES,
        fixes=ways,
    )


def _can_match(survey: Survey) -> bool:
    """Return whether a process of the engine on a visible GPU would have been found on it."""
    if isinstance(survey.processes, Failure) or not survey.processes.engine:
        return False
    return _has_true_pids(survey) and all(gpu.reading.processes is not None for gpu in survey.gpus)


def _has_true_pids(survey: Survey) -> bool:
    return not isinstance(survey.readings, Failure) and are_pids_true(
        survey.readings, survey.processes
    )


def _explain_none(survey: Survey) -> tuple[Status, str, tuple[Fix, ...]]:
    processes, state = survey.processes, Status.MISSING
    share: tuple[Fix, ...] = fixes.SEE_THE_PROCESSES
    ways: tuple[Fix, ...]
    if isinstance(processes, Failure):
        text, ways = NOT_ATTRIBUTED, share if processes == HIDDEN else ()
    elif processes.ambiguous_engines:
        text, ways = AMBIGUOUS, fixes.SAY_WHICH_PORT
    elif isinstance(survey.page, Failure):
        state, text, ways = Status.UNKNOWN, "needs the engine to run, see engine", ()
    elif not processes.engine:
        text, ways = NOT_ATTRIBUTED, () if processes.sees_host_pids else share
    elif _can_match(survey):
        text = "none of the engine's processes is on a visible GPU: it is still starting, or uses GPUs that this"
        text, ways = f"{text} container does not see", fixes.SEE_THE_GPUS
    elif any(gpu.reading.failure for gpu in survey.gpus) and _has_true_pids(survey):
        text = "none of the engine's processes is on a GPU that can be read; they may be on one that cannot, see gpus"
        ways = ()
    else:
        text, ways = _explain_unmatched(survey)
    return state, text, (*ways, _name_gpus(survey))


def _explain_unmatched(survey: Survey) -> tuple[str, tuple[Fix, ...]]:
    seen = "the engine's processes are seen, but"
    if any(
        gpu.reading.vendor is Vendor.AMD and gpu.reading.processes is None for gpu in survey.gpus
    ):
        text = f"{seen} not their open files, which alone show a container who uses AMD's cards"
        return text, (*fixes.TRACE_THEM, fixes.SEE_HOST_PIDS)
    text = f"{seen} what this driver lists on the GPUs cannot be matched with them in a container"
    return text, (fixes.NEWER_DRIVER, fixes.SEE_HOST_PIDS)


def _name_gpus(survey: Survey) -> Fix:
    devices = [gpu.reading for gpu in survey.gpus]
    whole = Counter(device.index for device in devices if not device.uuid.startswith("MIG-"))
    names = [str(device.index) if whole[device.index] == 1 else device.uuid for device in devices]
    return fix_setting(
        f"HEADROOM_GPUS={','.join(names)}  # leave out those that the engine does not use"
    )
