"""Checks of the GPUs and the engine's processes, and which GPUs are the engine's."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from vllm_headroom.daemon.transitions import AMBIGUOUS, NOT_ATTRIBUTED
from vllm_headroom.derive.attribution import (
    Selection,
    are_pids_reliable,
    describe_leftover,
    describe_orphans,
    is_process_memory_reliable,
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
"""The series that exist only for the engine's GPUs."""

WITHOUT_NVML: Final = ("headroom_gpu_*", *OWNED_GPU_SERIES, "headroom_sample_skew_seconds")
NO_NVML: Final = "needs NVML, see nvml"


def check_nvml(survey: Survey) -> Check:
    """Check whether NVML responds, and report the driver version.

    The check is NOT_APPLICABLE if all GPUs are from AMD.
    """
    readings = survey.readings
    if isinstance(readings, Failure):
        ways = fixes.NVML.get(readings.reason, (fixes.KERNEL_LOG,))
        return Check(Status.MISSING, readings.message, absent=WITHOUT_NVML, fixes=ways)
    if all(device.vendor is Vendor.AMD for device in readings.devices):
        return Check(
            Status.NOT_APPLICABLE,
            "not needed: the GPUs are AMD's, whose driver reports them in /sys",
        )
    if not readings.driver_version:
        return Check(Status.OK, "NVML answers, and does not report the driver's version")
    return Check(Status.OK, f"NVML answers, driver {readings.driver_version}")


def check_gpus(survey: Survey) -> Check:
    """Check which GPUs are visible, and whether each can be read.

    The check is UNKNOWN if NVML fails.
    """
    if isinstance(survey.readings, Failure):
        return Check(Status.UNKNOWN, NO_NVML)
    devices = survey.readings.devices
    details = []
    for device in devices:
        named = f"{name_gpu_with_uuid(device)} {device.name}".rstrip()
        details.append(f"{named}{_describe_memory(device)}")
    for gpu in survey.gpus:
        name = name_gpu_with_uuid(gpu.reading)
        details += [f"{name}: {describe_leftover(leftover)}" for leftover in gpu.leftovers]
    # A GPU that responds without reporting its memory also counts as unreadable, because its series
    # are absent.
    unreadable = [device for device in devices if device.failure or device.memory is None]
    if not unreadable:
        return Check(Status.OK, f"{len(devices)} visible", details=tuple(details))
    return Check(
        Status.MISSING,
        f"{len(devices)} visible, of which {len(unreadable)} cannot be read",
        details=tuple(details),
        absent=tuple(
            f"headroom_gpu_memory_* of {name_gpu_with_uuid(device)}" for device in unreadable
        ),
        fixes=_fix_unreadable(unreadable),
    )


def _fix_unreadable(devices: list[GpuReading]) -> tuple[Fix, ...]:
    """Return the fixes for unreadable GPUs; NVIDIA GPUs with unknown memory have none."""
    failures = [device.failure for device in devices if device.failure]
    if failures:
        if failures[0].reason is Reason.NO_PERMISSION:
            return fixes.SEE_THE_GPUS
        return (fixes.KERNEL_LOG,)
    has_amd = any(device.vendor is Vendor.AMD for device in devices)
    return fixes.ASK_KFD if has_amd else ()


def name_gpu_with_uuid(device: GpuReading) -> str:
    """Return a GPU's name.

    The name has the index and the UUID. The UUID is unknown until the GPU has been opened once.
    """
    return f"GPU {device.index} ({device.uuid or 'UUID not known'})"


def _describe_memory(device: GpuReading) -> str:
    """Return why a GPU's memory is unknown, or that it is the machine's.

    Returns an empty string for a GPU with separate memory that can be read.
    """
    if device.failure is not None:
        return f": {device.failure.message}"
    if device.memory is None and device.vendor is Vendor.AMD:
        return (
            ": KFD does not report what its processes may use of its memory or the machine's, or"
            " not to this container"
        )
    if device.memory is None:
        return ": NVML reports no memory for it"
    if not device.memory.is_unified:
        return ""
    total = format_gib(device.memory.total_bytes)
    free = format_gib(device.memory.free_bytes)
    # This GPU uses the machine's memory. When that memory is full, the machine swaps and then
    # hangs.
    return (
        f", unified memory: {free} left of the {total} that it may take of the machine's,"
        " by /proc/meminfo"
    )


WITHOUT_HOLDERS: Final = ('headroom_gpu_memory_held_bytes{holder="engine"|"other"}',)
WITHOUT_PROCESSES: Final = ("headroom_host_*", "headroom_leak_bound_bytes", *WITHOUT_HOLDERS)
"""The series that are absent if /proc shows no vLLM process."""

WITHOUT_PROC: Final = ("headroom_memory_pressure_ratio", *WITHOUT_PROCESSES)
"""The series that are absent if /proc cannot be read. These are the machine's memory pressure, and
the series that also need a vLLM process.
"""

BASES: Final[Mapping[HostBasis | None, str]] = {
    HostBasis.CGROUP: "by the cgroup of vLLM's processes",
    HostBasis.MACHINE: "by the machine, since their cgroup has no limit",
    HostBasis.PROCESSES: (
        "by what its processes hold themselves and their /dev/shm, since their cgroup is not seen"
    ),
}
SHOW_PROC: Final = put("in the systemd unit", "ProtectProc=default", "ProcSubset=all")
STUCK: Final = put(f"{fixes.NODE}, to find them", "ps -eo pid,stat,wchan:32,args | awk '$2 ~ /^D/'")
ON_ITS_MACHINE: Final = put("on the machine where vLLM runs", "vllm-headroom doctor")
ASK_THE_NODE: Final = put(
    f"{fixes.NODE}, to see whether the driver reports it",
    "nvidia-smi --query-compute-apps=pid,used_memory --format=csv",
)


def check_processes(survey: Survey) -> Check:
    """Check whether the engine's processes are visible, which requires a shared PID namespace."""
    processes = survey.processes
    if isinstance(processes, Failure):
        ways: tuple[Fix, ...] = (SHOW_PROC,)
        # Each cause has a different fix.
        if processes == HIDDEN:
            ways = (*fixes.SEE_THE_PROCESSES, SHOW_PROC)
        elif processes.reason is Reason.TIMEOUT:
            ways = (STUCK,)
        return Check(Status.MISSING, processes.message, absent=WITHOUT_PROC, fixes=ways)
    orphans = describe_orphans(processes.left_behind, survey.gpus)
    orphan_details = (orphans,) if orphans else ()
    if processes.engine:
        roles = fixes.count_roles(process.role for process in processes.engine)
        return Check(
            Status.OK,
            f"vLLM's are seen ({roles}), in {_name_namespace(processes)}",
            details=(*_describe_host(survey, processes), *orphan_details),
        )
    status, text, ways = _explain_no_process(survey, processes)
    return Check(status, text, details=orphan_details, absent=WITHOUT_PROCESSES, fixes=ways)


def _explain_no_process(
    survey: Survey, processes: ProcessReadings
) -> tuple[Status, str, tuple[Fix, ...]]:
    """Return the state, why no engine process is visible, and the fixes.

    If the engine does not respond either, the state is UNKNOWN, because the engine may not be
    running.
    """
    if processes.ambiguous_engines:
        return Status.MISSING, AMBIGUOUS, fixes.SAY_WHICH_PORT
    place = f"the {len(processes.visible_pids)} seen in {_name_namespace(processes)}"
    # While the engine is down, the absence of its processes proves nothing.
    if isinstance(survey.page, Failure):
        text = f"vLLM's are not among {place}; it does not answer, so it may not be running"
        return Status.UNKNOWN, text, _share_processes(processes)
    text = f"vLLM answers, but its processes are not among {place}"
    if processes.sees_host_pids:
        text += ": it runs on another machine, or other users' processes are hidden from this one"
        return Status.MISSING, text, (ON_ITS_MACHINE, SHOW_PROC)
    text += ", which is not shared with vLLM's container"
    return Status.MISSING, text, fixes.SEE_THE_PROCESSES


def _share_processes(processes: ProcessReadings) -> tuple[Fix, ...]:
    """Return the fixes that share the PID namespace.

    If all processes are visible, there are none.
    """
    return () if processes.sees_host_pids else fixes.SEE_THE_PROCESSES


def _describe_host(survey: Survey, processes: ProcessReadings) -> Iterator[str]:
    """Describe the used host memory and the swap, as far as known."""
    # The state is empty, because there is no earlier reading.
    _, memory = update_container(ContainerState(), processes, limit_bytes=survey.host_limit_bytes)
    if memory is not None and memory.used_bytes is not None:
        limit = ", of a limit that is not known (HEADROOM_HOST_MEMORY_LIMIT_BYTES sets it),"
        if memory.limit_bytes is not None:
            limit = f" of {format_gib(memory.limit_bytes)}"
        used = format_gib(memory.used_bytes)
        yield f"host memory: {used}{limit} in use, {BASES[memory.basis]}"
    machine = processes.host.machine
    if machine is not None and machine.swap_bytes:
        used = format_gib(machine.swap_bytes - machine.swap_free_bytes)
        total = format_gib(machine.swap_bytes)
        yield (
            f"swap, zram included: {used} of {total} in use; no time to out-of-memory counts on it"
        )


def check_process_memory(survey: Survey) -> Check:
    """Check whether the driver reports the memory of each process correctly.

    The check is UNKNOWN if NVML or the processes cannot be read.
    """
    readings = survey.readings
    processes = survey.processes
    if isinstance(readings, Failure):
        return Check(Status.UNKNOWN, NO_NVML)
    if isinstance(processes, Failure):
        return Check(Status.UNKNOWN, "needs the processes, see processes")
    driver = readings.driver_version
    has_amd = any(device.vendor is Vendor.AMD for device in readings.devices)
    if driver is None and not processes.sees_host_pids and not has_amd:
        return Check(Status.UNKNOWN, "the driver does not report its version")
    if not is_process_memory_reliable(readings, processes):
        problem = "reports the host's pids, which differ here"
        if are_pids_reliable(readings, processes):
            problem = "may report another process's memory"
        return Check(
            Status.MISSING,
            f"outside the machine's first PID namespace, driver {driver} {problem}: the daemon does"
            " not use it, and attributes all memory in use on the engine's GPUs to the engine",
            absent=WITHOUT_HOLDERS,
            fixes=(fixes.NEWER_DRIVER, fixes.SEE_HOST_PIDS),
        )
    engine_pids = {process.pid for process in processes.engine}
    unreported = [
        name_gpu_with_uuid(device)
        for device in readings.devices
        if not _reports_memory(device, engine_pids)
    ]
    if unreported:
        # On AMD cards, the memory is read from the processes' open files. Reading these files
        # requires a permission.
        ways: tuple[Fix, ...] = (ASK_THE_NODE,)
        if has_amd:
            ways = (*fixes.TRACE_THEM, fixes.SEE_HOST_PIDS)
        return Check(
            Status.MISSING,
            f"the driver does not report the memory of each process on {', '.join(unreported)}",
            absent=WITHOUT_HOLDERS,
            fixes=ways,
        )
    source = f"driver {driver or 'of unknown version'}"
    if driver is None and has_amd:
        source = "AMD's driver"
    return Check(
        Status.OK,
        f"{source} reports each process's own memory, as seen from {_name_namespace(processes)}",
    )


def _reports_memory(device: GpuReading, engine_pids: Collection[int]) -> bool:
    """Return whether the driver reports the memory of the engine's processes on this device.

    Returns True for a device that cannot be read. Another check covers that case.
    """
    if device.failure is not None:
        return True
    if device.processes is None:
        return False
    return not any(
        process.used_bytes is None and process.pid in engine_pids for process in device.processes
    )


def _name_namespace(processes: ProcessReadings) -> str:
    if processes.sees_host_pids:
        return "the machine's first PID namespace"
    return "a container's PID namespace"


ATTRIBUTIONS: Final = {
    Attribution.PROCESS: "the engine's (process: one of its processes is on it)",
    Attribution.UUID: "the engine's (uuid: HEADROOM_GPUS names it)",
    Attribution.SINGLE: "attributed to the engine (single: no other is visible)",
    Attribution.ASSUMED: "attributed to the engine (assumed: HEADROOM_GPUS is all)",
    None: "not attributed to the engine",
}


def check_gpu_attribution(survey: Survey, selection: Selection) -> Check:
    """Check which GPUs are attributed to the engine and how.

    If there are none, the check gives the reason. The check is UNKNOWN if NVML fails.
    """
    if isinstance(survey.readings, Failure):
        return Check(Status.UNKNOWN, NO_NVML)
    status, text, ways = _judge_attribution(survey, selection)
    is_any_owned = any(gpu.attribution for gpu in survey.gpus)
    return Check(
        status,
        text,
        details=tuple(
            f"{name_gpu_with_uuid(gpu.reading)} {ATTRIBUTIONS[gpu.attribution]}"
            for gpu in survey.gpus
        ),
        absent=() if is_any_owned else OWNED_GPU_SERIES,
        fixes=ways,
    )


def _judge_attribution(survey: Survey, selection: Selection) -> tuple[Status, str, tuple[Fix, ...]]:
    """Return the check's state, text and fixes."""
    ways: tuple[Fix, ...] = (_name_gpus(survey), *fixes.SEE_THE_GPUS)
    visible_names = set()
    for gpu in survey.gpus:
        visible_names |= {gpu.reading.uuid.casefold(), str(gpu.reading.index)}
    invisible = [name for name in selection.listed if name.casefold() not in visible_names]
    if invisible:
        text = f"HEADROOM_GPUS names GPUs that are not visible: {', '.join(invisible)}"
        return Status.MISSING, text, ways
    left_out = [name_gpu_with_uuid(gpu.reading) for gpu in survey.gpus if gpu.is_left_out]
    if left_out:
        text = (
            "HEADROOM_GPUS leaves out GPUs that the engine's processes are on:"
            f" {', '.join(left_out)}"
        )
        way = fix_setting("# remove HEADROOM_GPUS: the engine's processes show its GPUs")
        return Status.MISSING, text, (way,)
    owned = [gpu for gpu in survey.gpus if gpu.attribution]
    if not owned:
        return _explain_none(survey)
    is_single = owned[0].attribution is Attribution.SINGLE
    is_up = not isinstance(survey.page, Failure)
    if is_single and is_up and _can_match(survey):
        # If an engine process were on the GPU, the attribution would be PROCESS.
        text = (
            "the only visible GPU is attributed to the engine, but none of the engine's processes"
            " is on it"
        )
        return Status.UNKNOWN, text, ways
    return Status.OK, f"{len(owned)} of {len(survey.gpus)} attributed to the engine", ()


def _can_match(survey: Survey) -> bool:
    """Return whether the engine's processes can be matched with those on all visible GPUs."""
    if isinstance(survey.processes, Failure) or not survey.processes.engine:
        return False
    return _has_reliable_pids(survey) and all(
        gpu.reading.processes is not None for gpu in survey.gpus
    )


def _has_reliable_pids(survey: Survey) -> bool:
    """Return whether NVML's pids match the visible processes; False if NVML fails."""
    if isinstance(survey.readings, Failure):
        return False
    return are_pids_reliable(survey.readings, survey.processes)


def _explain_none(survey: Survey) -> tuple[Status, str, tuple[Fix, ...]]:
    """Return the state, the reason why the engine has no GPU, and the fixes.

    The state is MISSING if the engine's processes cannot be read or are ambiguous. The state is
    also MISSING if the engine responds. In all other cases, the state is UNKNOWN.
    """
    status = Status.MISSING
    if isinstance(survey.page, Failure) and not _is_process_problem(survey):
        status = Status.UNKNOWN
        text = "needs the engine to run, see engine"
        ways: tuple[Fix, ...] = ()
    else:
        text, ways = _explain_unattributed(survey)
    return status, text, (*ways, _name_gpus(survey))


def _is_process_problem(survey: Survey) -> bool:
    """Return whether the engine's processes would be unknown even if the engine were running."""
    processes = survey.processes
    return isinstance(processes, Failure) or bool(processes.ambiguous_engines)


def _explain_unattributed(survey: Survey) -> tuple[str, tuple[Fix, ...]]:
    """Return why the engine's processes do not identify a GPU, and the fixes."""
    processes = survey.processes
    # The obstacles are ordered from general to specific. The first obstacle that applies explains
    # all later ones.
    if isinstance(processes, Failure):
        return NOT_ATTRIBUTED, fixes.SEE_THE_PROCESSES if processes == HIDDEN else ()
    if processes.ambiguous_engines:
        return AMBIGUOUS, fixes.SAY_WHICH_PORT
    if not processes.engine:
        return NOT_ATTRIBUTED, _share_processes(processes)
    if _can_match(survey):
        text = (
            "none of the engine's processes is on a visible GPU: it is still starting, or uses GPUs"
            " that this container does not see"
        )
        return text, fixes.SEE_THE_GPUS
    if any(gpu.reading.failure for gpu in survey.gpus) and _has_reliable_pids(survey):
        text = (
            "none of the engine's processes is on a GPU that can be read; they may be on one that"
            " cannot, see gpus"
        )
        return text, ()
    if any(_is_unlisted_amd(gpu.reading) for gpu in survey.gpus):
        text = (
            "the engine's processes are seen, but not their open files, which alone show a"
            " container who uses AMD's cards"
        )
        return text, (*fixes.TRACE_THEM, fixes.SEE_HOST_PIDS)
    text = (
        "the engine's processes are seen, but what this driver lists on the GPUs cannot be matched"
        " with them in a container"
    )
    return text, (fixes.NEWER_DRIVER, fixes.SEE_HOST_PIDS)


def _is_unlisted_amd(device: GpuReading) -> bool:
    return device.vendor is Vendor.AMD and device.processes is None


def _name_gpus(survey: Survey) -> Fix:
    """Return the fix that names all visible GPUs.

    GPUs are named by index or, if the index is ambiguous, by UUID.
    """
    devices = [gpu.reading for gpu in survey.gpus]
    # MIG instances and AMD partitions share their GPU's index. Only their UUIDs identify them.
    index_counts = Counter(device.index for device in devices if not device.uuid.startswith("MIG-"))
    names = []
    for device in devices:
        is_index_unique = index_counts[device.index] == 1
        names.append(str(device.index) if is_index_unique else device.uuid)
    return fix_setting(
        f"HEADROOM_GPUS={','.join(names)}  # leave out those that the engine does not use"
    )
