"""Decide which GPUs, and how much of their memory, the engine uses."""

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
"""What became of a process, as a clause that follows its name."""

WHAT_TO_DO: Final = {
    Fate.ORPHANED: "end it with kill {pid}, or kill -9 {pid}",
    Fate.ZOMBIE: "no signal helps; restart its container or parent, else reset the GPU or reboot"
    " the node",
    Fate.VANISHED: "the driver gives it back within a minute, or keeps it until the GPU is reset",
}
"""How to get the memory back."""


def is_alive(pid: int, processes: ProcessReadings) -> bool:
    """Return whether a process with this pid exists and runs."""
    if pid in processes.zombies or pid in processes.exiting:
        return False
    return pid in processes.visible_pids


def describe_leftover(leftover: Leftover) -> str:
    """Return a clause: which process holds how much memory, and how to get it back."""
    size = "an unknown share"
    if leftover.used_bytes is not None:
        size = format_size(leftover.used_bytes)
    owner = f"pid {leftover.pid}," if leftover.pid else "a process"
    what_to_do = WHAT_TO_DO[leftover.fate].format(pid=leftover.pid or "PID")
    return f"{size} held by {owner} {FATE_TEXTS[leftover.fate]}: {what_to_do}"


def describe_orphans(orphans: frozenset[int], gpus: Iterable[Gpu]) -> str | None:
    """Return a clause about the orphans that hold no memory on these GPUs; None without any."""
    # Those that hold memory are named in the sentence on their GPU.
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
    """Return what became of a process that the driver lists; None if it is or may be alive.

    Its pid must mean the same process in NVML and /proc. `engine_pids` are the pids of the engine's
    former processes. A pid that /proc does not show counts as vanished if it was the engine's, or
    if /proc shows the whole machine; where pid 1 is not visible, other processes may be hidden too.
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
"""The first driver that lists the pids of the container's namespace; older drivers list the host's
pids in a container."""

_DRIVER_TRANSLATES_MEMORY: Final = (565, 57, 1)
"""The first driver that lists the memory of the right process in a container; drivers up to 560
list the right pids with another process's memory."""

_NVML_RACE_BYTES: Final = 64 * MIB
"""How much a process may free between two NVML calls. If the processes together exceed the memory
in use by more than this, the driver lists memory of another device."""


NEIGHBOUR_BYTES: Final = GIB
"""Less memory of other processes than this is not mentioned, as in the alert
HeadroomNeighbourGrowing: a CUDA context takes less. It is the limit for files in /dev/shm too, as
in HeadroomHostMemoryLow."""


class Selection(Struct, frozen=True, kw_only=True):
    """The GPUs that the operator selected; with both defaults, attribution is automatic."""

    everything: bool = False
    """Whether all visible GPUs are the engine's."""

    listed: tuple[str, ...] = ()
    """The UUIDs, in any case, or NVML indices of the engine's GPUs."""

    @classmethod
    def of(cls, gpus: str | tuple[str, ...]) -> "Selection":
        """Return the selection of the setting HEADROOM_GPUS: `auto`, `all` or a list of names."""
        if isinstance(gpus, tuple):
            return cls(listed=gpus)
        return cls(everything=gpus == "all")


class AttributionState(Struct, frozen=True, kw_only=True):
    """On which devices the engine's processes last were."""

    device_uuids: frozenset[str] = frozenset()
    """The UUIDs of the engine's last devices; empty before any was seen."""

    holders: frozenset[tuple[int, float]] = frozenset()
    """The pids and start times of the engine's processes that were last seen on these devices."""

    has_ledger: bool = False
    """Whether the driver has ever reported the memory of an engine process. If it has, a reading
    without that memory is a temporary gap.
    """

    engine_pids: frozenset[int] = frozenset()
    """The engine's pids last seen on any device. The pid of an exited process stays here while NVML
    lists it."""

    is_ambiguous: bool = False
    """Whether /proc showed several engines and none could be identified."""

    indices: dict[str, int] = field(default_factory=dict)
    """The NVML index that each device had when it was first seen, by UUID. NVML renumbers the
    others when a device disappears; HEADROOM_GPUS means the first numbers."""


def attribute(
    state: AttributionState,
    readings: GpuReadings,
    processes: ProcessReadings | Failure,
    selection: Selection,
) -> tuple[AttributionState, tuple[Gpu, ...]]:
    """Return every device with its attribution and the holders of its memory.

    Automatic attribution takes the devices on which the engine's processes hold memory. They are
    remembered while the engine is down, until a new engine holds memory. Before any such device was
    seen, a device is the engine's if it is the only one. Processes that an exited run left count as
    the engine's until they are gone.

    `engine_bytes` and `other_bytes` are known only where /proc and NVML mean the same process (in
    the host's PID namespace, or with driver 565.57.01 and newer), once an engine process was seen
    on a device, and while it is known which engine is the watched one. Where they are unknown,
    `held_bytes` is None if they were known before, and all used memory if they never can be known.
    """
    indices = {
        device.uuid: state.indices.get(device.uuid, device.index)
        for device in readings.devices
        if device.uuid
    }
    state = _follow_engine(replace(state, indices=indices), readings, processes)
    is_memory_reliable = is_process_memory_reliable(readings, processes)
    # Memory is split, and a process's fate is found, only by pids that mean the same process.
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
    # Where the engine's memory will be known again, nothing is assumed in the meantime.
    can_be_known = state.has_ledger or state.is_ambiguous

    gpus = []
    for device in readings.devices:
        attribution = _attribute_device(
            device, state, selection, device_count=len(readings.devices)
        )
        engine_bytes, other_bytes = _split_memory(device, splitting_processes, engine_pids)
        held_bytes = engine_bytes
        # Old drivers in a container never report it: then all that is in use counts as the
        # engine's.
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
    """Return the used memory that is not known to belong to others.

    None where the memory is unknown, and on unified memory, which everything on the machine uses.
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
    """Return the processes on a device that outlived their engine, or are dead.

    Empty where `processes` are not known. Memory that is not reliably reported is None.
    """
    if not isinstance(processes, ProcessReadings):
        return ()
    leftovers = []
    for process in device.processes or ():
        fate = find_fate(process.pid, processes, engine_pids)
        # Without a fate the process is or may be alive: it is no leftover.
        if fate is not None:
            used_bytes = process.used_bytes if is_memory_reliable else None
            leftovers.append(Leftover(pid=process.pid, fate=fate, used_bytes=used_bytes))
    return tuple(leftovers)


def are_pids_reliable(readings: GpuReadings, processes: ProcessReadings | Failure) -> bool:
    """Return whether NVML and /proc mean the same process by one pid."""
    return _has_same_pids(processes, readings, _DRIVER_TRANSLATES_PIDS)


def is_process_memory_reliable(readings: GpuReadings, processes: ProcessReadings | Failure) -> bool:
    """Return whether the memory that NVML lists for a pid belongs to that process."""
    return _has_same_pids(processes, readings, _DRIVER_TRANSLATES_MEMORY)


def _follow_engine(
    state: AttributionState, readings: GpuReadings, processes: ProcessReadings | Failure
) -> AttributionState:
    """Return the state with the devices on which the engine's processes are now.

    While a process of the last reading is still on a device, it is the same engine. It keeps the
    devices that it has freed, because an exiting engine frees its devices one by one.
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

    # An exited process stays the engine's while NVML lists it: its memory is not free yet.
    exited_pids = frozenset(pid for pid in state.engine_pids if not is_alive(pid, processes))
    engine_pids = exited_pids | processes.orphans | frozenset(starts)
    state = replace(state, engine_pids=engine_pids & pids_on_devices)
    if not devices:
        return state
    # By pid and start time, because a pid may be in use again.
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
    """Return whether NVML and /proc agree: in the host's PID namespace, or with a new driver."""
    if isinstance(processes, Failure):
        return False
    if processes.sees_host_pids:
        return True
    # For AMD's GPUs, only processes that /proc shows under the same pid are listed.
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
    """Return why a device counts as the engine's; None where it does not."""
    # The operator's setting comes first, even where the processes are seen on other devices.
    if selection.everything:
        return Attribution.ASSUMED
    if selection.listed:
        # By the first index: NVML renumbers the GPUs behind one that was lost.
        index = state.indices.get(device.uuid, device.index)
        names = {name.casefold() for name in selection.listed}
        is_listed = device.uuid.casefold() in names or str(index) in names
        return Attribution.UUID if is_listed else None
    # Attribution is automatic: it never guesses among several devices.
    if state.device_uuids:
        return Attribution.PROCESS if device.uuid in state.device_uuids else None
    return Attribution.SINGLE if device_count == 1 else None


def _split_memory(
    device: GpuReading, processes: ProcessReadings | Failure | None, engine_pids: frozenset[int]
) -> tuple[int | None, int | None]:
    """Return the bytes that the engine's processes hold, and those that other live ones hold.

    Both are None where the processes are not known, or together hold more than is in use. One is
    None where the driver does not report the memory of one of its processes. The two need not sum
    to the memory in use.
    """
    if not isinstance(processes, ProcessReadings):
        return None, None
    if device.processes is None or device.memory is None:
        return None, None
    # None stays in the list: with an unknown size the sum is unknown.
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
    # A sum that is too large contains memory of another device: neither sum is reliable.
    if (engine_bytes or 0) + (other_bytes or 0) > used_bytes + _NVML_RACE_BYTES:
        return None, None
    # NVML reads the two figures one after the other. Within that race, the sum is capped at the
    # memory in use.
    if engine_bytes is not None:
        engine_bytes = min(engine_bytes, used_bytes)
    if other_bytes is not None:
        other_bytes = min(other_bytes, used_bytes - (engine_bytes or 0))
    return engine_bytes, other_bytes


def add_lost_gpus(snapshot: Snapshot) -> Snapshot:
    """Attribute GPUs that cannot be opened to the engine, if they must be its GPUs.

    A GPU that cannot be opened has no UUID and no process list. Where GPUs of the engine are
    missing, the unopened GPUs are attributed to it if there are no more of them than missing ones.
    Meanwhile no other readable GPU is assumed to be the engine's, even if it is the only one. The
    snapshot is returned unchanged where no GPU is missing.
    """
    if snapshot.engine_status is None or not snapshot.devices:
        return snapshot
    engine_uuids = {uuid for uuid, _ in snapshot.engine_status.first_room_bytes}
    missing_uuids = sorted(engine_uuids - {gpu.reading.uuid for gpu in snapshot.devices})
    if not missing_uuids:
        return snapshot
    # More unopened GPUs than missing ones: some of them are not the engine's, and it is unknown
    # which.
    unopened_count = sum(1 for gpu in snapshot.devices if not gpu.reading.uuid)
    is_engines = unopened_count <= len(missing_uuids)
    # Where several GPUs are missing, it is unknown which of them an unopened GPU is.
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
    """Return an unreadable GPU as one of the engine's; the UUID is empty where it is unknown."""
    return replace(
        gpu,
        reading=replace(gpu.reading, uuid=uuid),
        attribution=gpu.attribution or Attribution.PROCESS,
    )
