"""Attribution of GPUs and their memory to the engine."""

from collections.abc import Iterable
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom.derive.sums import sum_known
from vllm_headroom.model import (
    Failure,
    Fate,
    Gpu,
    GpuReading,
    GpuReadings,
    Leftover,
    ProcessReadings,
    Vendor,
)
from vllm_headroom.units import GIB, MIB, format_size
from vllm_headroom.vocabulary import Attribution

FATE_TEXTS: Final = {
    Fate.ORPHANED: "left behind by an engine that has ended",
    Fate.ZOMBIE: "which has ended and hangs in the driver",
    Fate.VANISHED: "which no longer exists",
}
"""What became of a process, after its name."""

WHAT_TO_DO: Final = {
    Fate.ORPHANED: "end it with kill {pid}, or kill -9 {pid}",
    Fate.ZOMBIE: "no signal helps; restart its container or parent, else reset the GPU or reboot"
    " the node",
    Fate.VANISHED: "the driver gives it back within a minute, or keeps it until the GPU is reset",
}
"""How to get the memory back."""


def is_alive(pid: int, processes: ProcessReadings) -> bool:
    """Return whether a process with this pid exists and runs."""
    return pid in processes.visible_pids and pid not in processes.zombies


def describe_leftover(leftover: Leftover) -> str:
    """Return the bytes held, the owner and the remedy, as a sentence part."""
    size = "an unknown share"
    if leftover.used_bytes is not None:
        size = format_size(leftover.used_bytes)
    owner = f"pid {leftover.pid}," if leftover.pid else "a process"
    what_to_do = WHAT_TO_DO[leftover.fate].format(pid=leftover.pid or "PID")
    return f"{size} held by {owner} {FATE_TEXTS[leftover.fate]}: {what_to_do}"


def describe_orphans(orphans: frozenset[int], gpus: Iterable[Gpu]) -> str | None:
    """Return a sentence about orphans that hold memory on no GPU; None without any."""
    holders = set[int]()
    for gpu in gpus:
        holders.update(leftover.pid for leftover in gpu.leftovers)
    pids = [str(pid) for pid in sorted(orphans - holders)]
    if not pids:
        return None
    what_to_do = WHAT_TO_DO[Fate.ORPHANED].format(pid=" ".join(pids))
    subject = f"pid {pids[0]} is" if len(pids) == 1 else f"pids {', '.join(pids)} are"
    return f"{subject} {FATE_TEXTS[Fate.ORPHANED]}: {what_to_do}"


def find_fate(pid: int, processes: ProcessReadings, engine_pids: frozenset[int]) -> Fate | None:
    """Return what became of a process whose pid is the same in NVML and /proc.

    None where it is, or may be, alive. `engine_pids` are those of the engine's previous processes.
    A process never seen before counts as vanished only where /proc shows the whole machine:
    without pid 1 some are hidden.
    """
    if pid in processes.left_behind:
        return Fate.ORPHANED
    if pid in processes.zombies:
        return Fate.ZOMBIE
    if pid in processes.visible_pids:
        return None
    sees_all = processes.sees_host_pids and 1 in processes.visible_pids
    if sees_all or pid in engine_pids:
        return Fate.VANISHED
    return None


# Outside the machine's first PID namespace, what an NVIDIA driver lists depends on its version
# (open-gpu-kernel-modules, gpu_rmapi.c: `_gpuConvertPid`, `_gpuMatchClientPid`; #614).

_DRIVER_TRANSLATES_PIDS: Final = (535, 113, 1)
"""Older drivers list host pids there."""

_DRIVER_TRANSLATES_MEMORY: Final = (565, 57, 1)
"""Drivers up to 560 list the right pids there, with another process's memory."""

_NVML_RACE_BYTES: Final = 64 * MIB
"""What a process may free between two NVML calls; a larger excess means the sum counts memory of
another device."""


NEIGHBOUR_BYTES: Final = GIB
"""Memory of other processes is mentioned from here on, as in HeadroomNeighbourGrowing; CUDA
contexts are smaller. Files in /dev/shm too, as in HeadroomHostMemoryLow."""


class Selection(Struct, frozen=True, kw_only=True):
    """The GPUs that the operator selected; where both fields are empty, automatic attribution."""

    everything: bool = False
    """Whether all visible GPUs are the engine's."""

    listed: tuple[str, ...] = ()
    """The UUIDs, in any case, or NVML indices of the engine's GPUs."""

    @classmethod
    def of(cls, gpus: str | tuple[str, ...]) -> "Selection":
        """Return what `auto`, `all` or a list of names selects."""
        if isinstance(gpus, tuple):
            return cls(listed=gpus)
        return cls(everything=gpus == "all")


class AttributionState(Struct, frozen=True, kw_only=True):
    """Where the engine's processes were last seen."""

    device_uuids: frozenset[str] = frozenset()
    """The UUIDs of the engine's last devices."""

    holders: frozenset[tuple[int, float]] = frozenset()
    """The engine's processes (pid, start time) last seen on them."""

    has_ledger: bool = False
    """Whether the driver has ever reported the memory of an engine process: then a gap is
    temporary."""

    engine_pids: frozenset[int] = frozenset()
    """The engine's pids last seen on any device: one that has exited stays the engine's while NVML
    lists it."""

    is_ambiguous: bool = False
    """Whether /proc showed several engines and none could be identified."""

    indices: dict[str, int] = field(default_factory=dict)
    """The NVML indices at first sight, by UUID: NVML renumbers when a device disappears, and the
    configuration means the first numbers."""


def attribute(
    state: AttributionState,
    readings: GpuReadings,
    processes: ProcessReadings | Failure,
    selection: Selection,
) -> tuple[AttributionState, tuple[Gpu, ...]]:
    """Return every device with its attribution and the holders of its memory.

    Automatic attribution follows the engine's processes: the devices on which they hold memory,
    remembered while the engine is down until a new engine holds memory. Before any was seen, it is
    the only device there is; it never guesses among several. What an exited run left behind stays
    the engine's until it is gone.

    Holders are None unless /proc and NVML mean the same process (host PID namespace, or driver
    565.57.01 and newer) and an engine process has been seen on a device, and while several
    engines are indistinguishable. Then the engine's memory is None if it was known before, and
    all used memory if it never can be known.
    """
    indices = {
        device.uuid: state.indices.get(device.uuid, device.index)
        for device in readings.devices
        if device.uuid
    }
    state = _follow_engine(replace(state, indices=indices), readings, processes)
    is_memory_true = is_process_memory_true(readings, processes)
    # Memory is split, and a process's fate is found, only by pids that mean the same process.
    splitting_processes = None
    if state.device_uuids and is_memory_true and not state.is_ambiguous:
        splitting_processes = processes
    fate_processes = None
    if are_pids_true(readings, processes):
        fate_processes = processes
    engine_pids = state.engine_pids
    if not isinstance(processes, Failure):
        current_pids = {process.pid for process in processes.engine}
        engine_pids = engine_pids.union(processes.orphans, current_pids)
    # Then what the engine holds is known again later: nothing is assumed until then.
    can_be_known = state.has_ledger or state.is_ambiguous

    gpus = []
    for device in readings.devices:
        attribution = _attribute_device(
            device, state, selection, device_count=len(readings.devices)
        )
        engine_bytes, other_bytes = _split_memory(device, splitting_processes, engine_pids)
        held_bytes = engine_bytes
        if engine_bytes is None and not can_be_known:
            held_bytes = _assume_held_bytes(device, other_bytes)
        gpu = Gpu(
            reading=device,
            attribution=attribution,
            engine_bytes=engine_bytes,
            other_bytes=other_bytes,
            held_bytes=held_bytes if attribution else None,
            process_count=None if device.processes is None else len(device.processes),
            leftovers=_find_leftovers(
                device, fate_processes, state.engine_pids, is_memory_true=is_memory_true
            ),
        )
        gpus.append(gpu)
    return state, tuple(gpus)


def _assume_held_bytes(device: GpuReading, other_bytes: int | None) -> int | None:
    """Return all memory that is not known to be others'; None where the machine uses it too."""
    memory = device.memory
    if memory is None or memory.is_unified:
        return None
    return memory.used_bytes - (other_bytes or 0)


def _find_leftovers(
    device: GpuReading,
    processes: ProcessReadings | Failure | None,
    engine_pids: frozenset[int],
    *,
    is_memory_true: bool,
) -> tuple[Leftover, ...]:
    """Return the processes on a device that serve no engine; none without `processes`."""
    if not isinstance(processes, ProcessReadings):
        return ()
    leftovers = []
    for process in device.processes or ():
        fate = find_fate(process.pid, processes, engine_pids)
        if fate is not None:
            used_bytes = process.used_bytes if is_memory_true else None
            leftovers.append(Leftover(pid=process.pid, fate=fate, used_bytes=used_bytes))
    return tuple(leftovers)


def are_pids_true(readings: GpuReadings, processes: ProcessReadings | Failure) -> bool:
    """Return whether NVML and /proc mean the same process by one pid."""
    return _has_same_pids(processes, readings, _DRIVER_TRANSLATES_PIDS)


def is_process_memory_true(readings: GpuReadings, processes: ProcessReadings | Failure) -> bool:
    """Return whether the memory NVML lists for a pid belongs to that process."""
    return _has_same_pids(processes, readings, _DRIVER_TRANSLATES_MEMORY)


def _follow_engine(
    state: AttributionState, readings: GpuReadings, processes: ProcessReadings | Failure
) -> AttributionState:
    """Return where the engine runs now; one that frees its devices one by one is not a new one."""
    if isinstance(processes, Failure):
        return state
    state = replace(state, is_ambiguous=processes.ambiguous_engines > 0)
    if not are_pids_true(readings, processes):
        return state

    starts = {process.pid: process.started_at_seconds for process in processes.engine}
    pids_on_devices = set[int]()
    devices = set[str]()
    holders = set[tuple[int, float]]()
    is_memory_reported = False
    for device in readings.devices:
        for process in device.processes or ():
            pids_on_devices.add(process.pid)
            if process.pid in starts:
                devices.add(device.uuid)
                holders.add((process.pid, starts[process.pid]))
                is_memory_reported |= process.used_bytes is not None

    # One that has exited stays the engine's while NVML lists it: its memory is not free yet.
    exited_pids = frozenset(pid for pid in state.engine_pids if not is_alive(pid, processes))
    engine_pids = exited_pids | processes.orphans | frozenset(starts)
    state = replace(state, engine_pids=engine_pids & pids_on_devices)
    if not devices:
        return state
    is_same_engine = bool(holders & state.holders)
    if is_same_engine:
        devices |= state.device_uuids
    has_ledger = state.has_ledger
    if is_memory_reported and is_process_memory_true(readings, processes):
        has_ledger = True
    return replace(
        state,
        device_uuids=frozenset(devices),
        holders=frozenset(holders),
        has_ledger=has_ledger,
    )


def _has_same_pids(
    processes: ProcessReadings | Failure, readings: GpuReadings, driver_needed: tuple[int, int, int]
) -> bool:
    if isinstance(processes, Failure):
        return False
    if processes.sees_host_pids:
        return True
    # Of AMD's GPUs only such processes are listed as /proc shows under the same pid.
    if all(device.vendor is Vendor.AMD for device in readings.devices):
        return True
    try:
        version = tuple(int(part) for part in (readings.driver_version or "").split("."))
    except ValueError:
        return False
    return version >= driver_needed


def _attribute_device(
    device: GpuReading, state: AttributionState, selection: Selection, *, device_count: int
) -> Attribution | None:
    """Return how a device is the engine's, None where it is not."""
    if selection.everything:
        return Attribution.ASSUMED
    if selection.listed:
        index = state.indices.get(device.uuid, device.index)
        names = {name.casefold() for name in selection.listed}
        is_listed = device.uuid.casefold() in names or str(index) in names
        return Attribution.UUID if is_listed else None
    # Automatic: never a guess among several devices.
    if state.device_uuids:
        return Attribution.PROCESS if device.uuid in state.device_uuids else None
    return Attribution.SINGLE if device_count == 1 else None


def _split_memory(
    device: GpuReading, processes: ProcessReadings | Failure | None, engine_pids: frozenset[int]
) -> tuple[int | None, int | None]:
    """Return the bytes held by the engine's processes and by other live ones.

    The rest of what is in use is unattributed. Both are None where the processes are not known,
    or their sum exceeds what is in use; one is None where the driver does not report a process's
    memory.
    """
    if not isinstance(processes, ProcessReadings):
        return None, None
    if device.processes is None or device.memory is None:
        return None, None
    engine_sizes: list[int | None] = []
    other_sizes: list[int | None] = []
    for process in device.processes:
        if process.pid in engine_pids:
            engine_sizes.append(process.used_bytes)
        elif is_alive(process.pid, processes):
            other_sizes.append(process.used_bytes)
    engine_bytes = sum_known((0, *engine_sizes))
    other_bytes = sum_known((0, *other_sizes))

    used_bytes = device.memory.used_bytes
    # Then the driver lists memory of another device, and neither sum is to be trusted.
    if (engine_bytes or 0) + (other_bytes or 0) > used_bytes + _NVML_RACE_BYTES:
        return None, None
    if engine_bytes is not None:
        engine_bytes = min(engine_bytes, used_bytes)
    if other_bytes is not None:
        other_bytes = min(other_bytes, used_bytes - (engine_bytes or 0))
    return engine_bytes, other_bytes
