"""Decide which GPUs the engine uses, and how much of their memory."""

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
    Snapshot,
    Vendor,
)
from vllm_headroom.units import GIB, MIB, format_size
from vllm_headroom.vocabulary import Attribution

FATE_TEXTS: Final = {
    Fate.ORPHANED: "left behind by an engine that has ended",
    Fate.ZOMBIE: "which has ended and hangs in the driver",
    Fate.VANISHED: "which no longer exists",
}
"""What became of a process, as a clause that follows the process's name."""

WHAT_TO_DO: Final = {
    Fate.ORPHANED: "end it with kill {pid}, or kill -9 {pid}",
    Fate.ZOMBIE: "no signal helps; restart its container or parent, else reset the GPU or reboot"
    " the node",
    Fate.VANISHED: "the driver gives it back within a minute, or keeps it until the GPU is reset",
}
"""How to release a process's memory, depending on what became of the process."""


def is_alive(pid: int, processes: ProcessReadings) -> bool:
    """Return whether a process with this pid exists and is running."""
    if pid in processes.zombies or pid in processes.exiting:
        return False
    return pid in processes.visible_pids


def describe_leftover(leftover: Leftover) -> str:
    """Return a clause on a leftover process: its memory, and how to release it."""
    size = "an unknown share"
    if leftover.used_bytes is not None:
        size = format_size(leftover.used_bytes)
    owner = f"pid {leftover.pid}," if leftover.pid else "a process"
    what_to_do = WHAT_TO_DO[leftover.fate].format(pid=leftover.pid or "PID")
    return f"{size} held by {owner} {FATE_TEXTS[leftover.fate]}: {what_to_do}"


def describe_orphans(orphans: frozenset[int], gpus: Iterable[Gpu]) -> str | None:
    """Return a clause about orphans that hold no memory on these GPUs.

    Returns None if there are none.
    """
    # The sentence about a GPU already names the orphans that hold its memory.
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
    """Return what became of a process that the driver lists.

    Returns None if the process may be alive. The pid must refer to the same process in NVML and in
    /proc. `engine_pids` are the pids of the engine's former processes. A process that /proc does
    not show counts as vanished in two cases:

    - It belonged to the engine.
    - /proc shows all processes of the machine.

    If /proc does not show pid 1, it may hide other processes too.
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


# Outside the machine's initial PID namespace, an NVIDIA driver's pids depend on its version.
# Source: open-gpu-kernel-modules, gpu_rmapi.c (`_gpuConvertPid`, `_gpuMatchClientPid`; #614).

_DRIVER_TRANSLATES_PIDS: Final = (535, 113, 1)
"""The first driver version that lists pids as numbered in the container's PID namespace. In a
container, older drivers list the host's pids.
"""

_DRIVER_TRANSLATES_MEMORY: Final = (565, 57, 1)
"""The first driver version that, in a container, lists each process with its own memory. Drivers up
to 560 list the right pids, but with another process's memory.
"""

_NVML_RACE_BYTES: Final = 64 * MIB
"""A process may free this much memory between two NVML calls. If the processes' memory exceeds the
memory in use by more, the list is wrong. In that case, the driver has listed memory on another
device.
"""


NEIGHBOUR_BYTES: Final = GIB
"""Other processes are mentioned only from this much memory, as in the alert
HeadroomNeighbourGrowing. A CUDA context takes less. The same threshold applies to files in
/dev/shm, as in HeadroomHostMemoryLow.
"""


class Selection(Struct, frozen=True, kw_only=True):
    """The GPUs that the operator selected.

    If both fields have their defaults, attribution is automatic.
    """

    everything: bool = False
    """Whether all visible GPUs belong to the engine."""

    listed: tuple[str, ...] = ()
    """The engine's GPUs, by UUID (in upper or lower case) or by NVML index."""

    @classmethod
    def of(cls, gpus: str | tuple[str, ...]) -> "Selection":
        """Return the selection for a value of HEADROOM_GPUS: `auto`, `all` or a list of names."""
        if isinstance(gpus, tuple):
            return cls(listed=gpus)
        return cls(everything=gpus == "all")


class AttributionState(Struct, frozen=True, kw_only=True):
    """The devices on which the engine's processes were last seen."""

    device_uuids: frozenset[str] = frozenset()
    """The UUIDs of these devices. The set is empty until an engine process has been seen."""

    holders: frozenset[tuple[int, float]] = frozenset()
    """The pids and start times of the engine's processes last seen on these devices."""

    has_ledger: bool = False
    """Whether the driver has ever reported memory for an engine process. If it has, a reading
    without engine memory is treated as a temporary gap.
    """

    engine_pids: frozenset[int] = frozenset()
    """The pids of the engine's processes that were last seen on any device. The pid of an exited
    process is kept until NVML no longer lists it.
    """

    is_ambiguous: bool = False
    """Whether /proc showed several engines, so that the watched engine could not be determined."""

    indices: dict[str, int] = field(default_factory=dict)
    """The NVML index that each device had when it was first seen, by UUID. When a device
    disappears, NVML renumbers the others. HEADROOM_GPUS still refers to the original numbers.
    """


def attribute(
    state: AttributionState,
    readings: GpuReadings,
    processes: ProcessReadings | Failure,
    selection: Selection,
) -> tuple[AttributionState, tuple[Gpu, ...]]:
    """Return every device, whether it is the engine's, and which processes hold its memory.

    Automatic attribution selects the devices on which the engine's processes hold memory. These
    devices are remembered while the engine is down, until a new engine holds memory. Before any
    such device has been seen, a machine's only device counts as the engine's. Processes left behind
    by an exited run count as the engine's until they are gone.

    `engine_bytes` and `other_bytes` are known if all of these are true:

    - A pid refers to the same process in /proc and NVML. The pids agree in the host's PID
      namespace, and with driver 565.57.01 or newer.
    - An engine process has been seen on a device.
    - It is known which engine is watched.

    If the two values are unknown now but were known before, `held_bytes` is None. If the two values
    can never be known, `held_bytes` is all used memory.
    """
    indices = {
        device.uuid: state.indices.get(device.uuid, device.index)
        for device in readings.devices
        if device.uuid
    }
    state = _follow_engine(replace(state, indices=indices), readings, processes)
    is_memory_reliable = is_process_memory_reliable(readings, processes)
    # Splitting requires that a pid refers to the same process in NVML and /proc. So does finding a
    # process's fate.
    splitting_processes = None
    if state.device_uuids and is_memory_reliable and not state.is_ambiguous:
        splitting_processes = processes
    fate_processes = None
    if are_pids_reliable(readings, processes):
        fate_processes = processes
    engine_pids = state.engine_pids
    if not isinstance(processes, Failure):
        current_pids = {process.pid for process in processes.engine}
        engine_pids = engine_pids.union(processes.orphans, current_pids)
    # If the engine's memory can become known again, nothing is assumed in the meantime.
    can_be_known = state.has_ledger or state.is_ambiguous

    gpus = []
    for device in readings.devices:
        attribution = _attribute_device(
            device, state, selection, device_count=len(readings.devices)
        )
        engine_bytes, other_bytes = _split_memory(device, splitting_processes, engine_pids)
        held_bytes = engine_bytes
        # In a container, old drivers never report the engine's memory. All memory in use therefore
        # counts as the engine's.
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
                device, fate_processes, state.engine_pids, is_memory_reliable=is_memory_reliable
            ),
        )
        gpus.append(gpu)
    return state, tuple(gpus)


def _assume_held_bytes(device: GpuReading, other_bytes: int | None) -> int | None:
    """Return the used memory that is not known to belong to other processes.

    Returns None if the used memory is unknown. Also returns None for unified memory, because
    everything on the machine uses it.
    """
    memory = device.memory
    if memory is None or memory.is_unified:
        return None
    return memory.used_bytes - (other_bytes or 0)


def _find_leftovers(
    device: GpuReading,
    processes: ProcessReadings | Failure | None,
    engine_pids: frozenset[int],
    *,
    is_memory_reliable: bool,
) -> tuple[Leftover, ...]:
    """Return a device's processes that are dead, or that have outlived their engine.

    The result is empty if `processes` are not known. If memory is not reported reliably, each
    leftover's memory is None.
    """
    if not isinstance(processes, ProcessReadings):
        return ()
    leftovers = []
    for process in device.processes or ():
        fate = find_fate(process.pid, processes, engine_pids)
        # If the fate is unknown, the process may be alive.
        if fate is not None:
            used_bytes = process.used_bytes if is_memory_reliable else None
            leftovers.append(Leftover(pid=process.pid, fate=fate, used_bytes=used_bytes))
    return tuple(leftovers)


def are_pids_reliable(readings: GpuReadings, processes: ProcessReadings | Failure) -> bool:
    """Return whether a pid refers to the same process in NVML and /proc."""
    return _has_same_pids(processes, readings, _DRIVER_TRANSLATES_PIDS)


def is_process_memory_reliable(readings: GpuReadings, processes: ProcessReadings | Failure) -> bool:
    """Return whether the memory that NVML lists for a pid belongs to that process."""
    return _has_same_pids(processes, readings, _DRIVER_TRANSLATES_MEMORY)


def _follow_engine(
    state: AttributionState, readings: GpuReadings, processes: ProcessReadings | Failure
) -> AttributionState:
    """Return the state, updated with the devices that the engine's processes use now.

    If an earlier engine process is still on a device, the engine has not changed. In that case,
    devices that this engine has already freed are kept. An exiting engine frees its devices one by
    one.
    """
    if isinstance(processes, Failure):
        return state
    state = replace(state, is_ambiguous=processes.ambiguous_engines > 0)
    if not are_pids_reliable(readings, processes):
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

    # An exited process counts as the engine's while NVML lists it. The memory of such a listed
    # process has not been freed yet.
    exited_pids = frozenset(pid for pid in state.engine_pids if not is_alive(pid, processes))
    engine_pids = exited_pids | processes.orphans | frozenset(starts)
    state = replace(state, engine_pids=engine_pids & pids_on_devices)
    if not devices:
        return state
    # Processes are compared by pid and start time, because a pid may have been reused.
    is_same_engine = bool(holders & state.holders)
    if is_same_engine:
        devices |= state.device_uuids
    has_ledger = state.has_ledger
    if is_memory_reported and is_process_memory_reliable(readings, processes):
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
    """Return whether NVML and /proc use the same pids."""
    if isinstance(processes, Failure):
        return False
    if processes.sees_host_pids:
        return True
    # For AMD GPUs, only processes that /proc shows under the same pid are listed.
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
    """Return why a device counts as the engine's, or None if it does not."""
    # The operator's setting takes precedence, even if the engine's processes are on other devices.
    if selection.everything:
        return Attribution.ASSUMED
    if selection.listed:
        # The original index is used, because NVML renumbers the GPUs that follow a lost GPU.
        index = state.indices.get(device.uuid, device.index)
        names = {name.casefold() for name in selection.listed}
        is_listed = device.uuid.casefold() in names or str(index) in names
        return Attribution.UUID if is_listed else None
    # Automatic attribution never guesses among several devices.
    if state.device_uuids:
        return Attribution.PROCESS if device.uuid in state.device_uuids else None
    return Attribution.SINGLE if device_count == 1 else None


def _split_memory(
    device: GpuReading, processes: ProcessReadings | Failure | None, engine_pids: frozenset[int]
) -> tuple[int | None, int | None]:
    """Return the bytes held by the engine's processes, and those held by other live processes.

    Both sums are None if the processes are unknown, or if together the sums exceed the memory in
    use. A sum is None if the memory of one of its processes is unknown. Together, the sums may be
    less than the memory in use.
    """
    if not isinstance(processes, ProcessReadings):
        return None, None
    if device.processes is None or device.memory is None:
        return None, None
    # A size of None stays in the list, so that the sum becomes unknown.
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
    # A sum this large includes memory on another device, so neither figure is reliable.
    if (engine_bytes or 0) + (other_bytes or 0) > used_bytes + _NVML_RACE_BYTES:
        return None, None
    # NVML reads the processes' memory and the memory in use one after the other. If memory is freed
    # in between, the sum is too large and is capped.
    if engine_bytes is not None:
        engine_bytes = min(engine_bytes, used_bytes)
    if other_bytes is not None:
        other_bytes = min(other_bytes, used_bytes - (engine_bytes or 0))
    return engine_bytes, other_bytes


def add_lost_gpus(snapshot: Snapshot) -> Snapshot:
    """Attribute GPUs that cannot be opened to the engine if its GPUs are missing.

    A GPU that cannot be opened has neither a UUID nor a process list. Unopened GPUs count as the
    engine's unless they outnumber its missing GPUs. While GPUs are missing, a machine's only GPU is
    not assumed to be the engine's. If no GPU is missing, the snapshot is returned unchanged.
    """
    if snapshot.engine_status is None or not snapshot.devices:
        return snapshot
    engine_uuids = {uuid for uuid, _ in snapshot.engine_status.first_room_bytes}
    missing_uuids = sorted(engine_uuids - {gpu.reading.uuid for gpu in snapshot.devices})
    if not missing_uuids:
        return snapshot
    # If the unopened GPUs outnumber the missing ones, some are not the engine's. Which of the
    # unopened GPUs are the engine's is unknown.
    unopened_count = sum(1 for gpu in snapshot.devices if not gpu.reading.uuid)
    is_engines = unopened_count <= len(missing_uuids)
    # If several GPUs are missing, an unopened GPU cannot be matched to a missing one.
    lost_uuid = missing_uuids[0] if len(missing_uuids) == 1 else ""
    gpus = []
    for gpu in snapshot.devices:
        if is_engines and not gpu.reading.uuid:
            gpus.append(_attribute_lost(gpu, lost_uuid))
        elif gpu.attribution is Attribution.SINGLE and gpu.reading.uuid not in engine_uuids:
            gpus.append(replace(gpu, attribution=None, held_bytes=None))
        else:
            gpus.append(gpu)
    return replace(snapshot, gpus=tuple(gpus))


def _attribute_lost(gpu: Gpu, uuid: str) -> Gpu:
    """Return an unreadable GPU as one of the engine's; its UUID is empty if unknown."""
    return replace(
        gpu,
        reading=replace(gpu.reading, uuid=uuid),
        attribution=gpu.attribution or Attribution.PROCESS,
    )
