"""Attribution of GPUs and their memory to the engine."""

from collections.abc import Iterable
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom.derive.readings import sum_known
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
from vllm_headroom.units import format_size
from vllm_headroom.vocabulary import Attribution

FATE_TEXTS: Final = {
    Fate.ORPHANED: "left behind by an engine that has ended",
    Fate.ZOMBIE: "which has ended and hangs in the driver",
    Fate.VANISHED: "which no longer exists",
}
WHAT_TO_DO: Final = {
    Fate.ORPHANED: "end it with kill {pid}, or kill -9 {pid}",
    Fate.ZOMBIE: "no signal helps; restart its container or parent, else reset the GPU or reboot the node",
    Fate.VANISHED: "the driver gives it back within a minute, or keeps it until the GPU is reset",
}


def is_alive(pid: int, processes: ProcessReadings) -> bool:
    """Return whether a process with this pid exists and runs."""
    return pid in processes.visible_pids and pid not in processes.zombies


def describe_leftover(leftover: Leftover) -> str:
    """Return the bytes held, the owner and the remedy, as a sentence part."""
    held = "an unknown share" if leftover.used_bytes is None else format_size(leftover.used_bytes)
    pid = f"pid {leftover.pid}, " if leftover.pid else "a process "
    what_to_do = WHAT_TO_DO[leftover.fate].format(pid=leftover.pid or "PID")
    return f"{held} held by {pid}{FATE_TEXTS[leftover.fate]}: {what_to_do}"


def describe_orphans(orphans: frozenset[int], gpus: Iterable[Gpu]) -> str | None:
    """Return a sentence about orphans that hold memory on no GPU; None without any."""
    pids = [
        str(pid) for pid in sorted(orphans - {left.pid for gpu in gpus for left in gpu.leftovers})
    ]
    if not pids:
        return None
    what_to_do = WHAT_TO_DO[Fate.ORPHANED].format(pid=" ".join(pids))
    who = f"pid {pids[0]} is" if len(pids) == 1 else f"pids {', '.join(pids)} are"
    return f"{who} {FATE_TEXTS[Fate.ORPHANED]}: {what_to_do}"


def find_fate(pid: int, processes: ProcessReadings, ours: frozenset[int]) -> Fate | None:
    """Return what became of a process whose pid is the same in NVML and /proc; None when it is, or may be, alive.

    `ours` are the pids of the engine's previous processes. A process never seen before counts as vanished only where
    /proc shows the whole machine: without pid 1 some are hidden.
    """
    if pid in processes.left_behind:
        return Fate.ORPHANED
    if pid in processes.zombies:
        return Fate.ZOMBIE
    sees_all = processes.sees_host_pids and 1 in processes.visible_pids
    missing = pid not in processes.visible_pids
    return Fate.VANISHED if missing and (sees_all or pid in ours) else None


_DRIVER_TRANSLATES_PIDS: Final = (535, 113, 1)
_DRIVER_TRANSLATES_MEMORY: Final = (565, 57, 1)
"""Outside the machine's first PID namespace, older drivers list host pids, and those up to 560 list the right pids
with another process's memory (open-gpu-kernel-modules, gpu_rmapi.c: `_gpuConvertPid`, `_gpuMatchClientPid`; #614)."""

_RACE_BYTES: Final = 64 * 2**20
"""What a process may free between two NVML calls; a larger excess means the sum counts memory of another device."""


class Selection(Struct, frozen=True, kw_only=True):
    """The configured GPUs: `everything`, those `listed` by UUID (any case) or NVML index, or automatic."""

    everything: bool = False
    listed: tuple[str, ...] = ()

    @classmethod
    def of(cls, gpus: str | tuple[str, ...]) -> "Selection":
        """Return what `auto`, `all` or a list of names selects."""
        return cls(listed=gpus) if isinstance(gpus, tuple) else cls(everything=gpus == "all")


class AttributionState(Struct, frozen=True, kw_only=True):
    """The UUIDs of the engine's last devices, and its processes (pid, start time) last seen on them.

    `ledger_opened` is set once the driver has reported the memory of an engine process: a later gap is temporary.
    `ours` are the engine's pids last seen on any device: one that has exited stays the engine's while NVML lists it.
    `ambiguous` is whether /proc showed several engines and none could be identified. `indices` are the NVML indices at
    first sight, by UUID: NVML renumbers when a device disappears, and the configuration means the first numbers.
    """

    remembered: frozenset[str] = frozenset()
    holders: frozenset[tuple[int, float]] = frozenset()
    ledger_opened: bool = False
    ours: frozenset[int] = frozenset()
    ambiguous: bool = False
    indices: dict[str, int] = field(default_factory=dict)


def attribute(
    state: AttributionState,
    readings: GpuReadings,
    processes: ProcessReadings | Failure,
    selection: Selection,
) -> tuple[AttributionState, tuple[Gpu, ...]]:
    """Return every device with its attribution and the holders of its memory.

    Automatic attribution follows the engine's processes: the devices on which they hold memory, remembered while the
    engine is down until a new engine holds memory. Before any was seen, it is the only device there is; it never
    guesses among several. What an exited run left behind stays the engine's until it is gone.

    Holders are None unless /proc and NVML mean the same process (host PID namespace, or driver 565.57.01 and newer) and
    an engine process has been seen on a device, and while several engines are indistinguishable. Then the engine's
    memory is None if it was known before, and all used memory if it never can be known.
    """
    indices = {
        each.uuid: state.indices.get(each.uuid, each.index)
        for each in readings.devices
        if each.uuid
    }
    state = _follow(replace(state, indices=indices), readings, processes)
    knowable = state.ledger_opened or state.ambiguous
    memory_is_true = is_process_memory_true(readings, processes)
    named = processes if are_pids_true(readings, processes) else None
    ledger = processes if state.remembered and memory_is_true and not state.ambiguous else None
    engine = (
        ()
        if isinstance(processes, Failure)
        else (*processes.orphans, *(each.pid for each in processes.engine))
    )
    engine_pids = state.ours.union(engine)
    gpus = []
    for device in readings.devices:
        engine_bytes, other_bytes = _split_memory(device, ledger, engine_pids)
        attribution = _attribute_device(device, state, selection, devices=len(readings.devices))
        held_bytes, memory = engine_bytes, device.memory
        if engine_bytes is None and not knowable and memory is not None:
            held_bytes = None if memory.is_unified else memory.used_bytes - (other_bytes or 0)
        left = [
            Leftover(
                pid=process.pid,
                fate=fate,
                used_bytes=process.used_bytes if memory_is_true else None,
            )
            for process in device.processes or ()
            if isinstance(named, ProcessReadings)
            and (fate := find_fate(process.pid, named, state.ours)) is not None
        ]
        gpu = Gpu(
            reading=device,
            attribution=attribution,
            engine_bytes=engine_bytes,
            other_bytes=other_bytes,
            held_bytes=held_bytes if attribution else None,
            process_count=None if device.processes is None else len(device.processes),
            leftovers=tuple(left),
        )
        gpus.append(gpu)
    return state, tuple(gpus)


def are_pids_true(readings: GpuReadings, processes: ProcessReadings | Failure) -> bool:
    """Return whether NVML and /proc mean the same process by one pid."""
    return _has_same_pids(processes, readings, _DRIVER_TRANSLATES_PIDS)


def is_process_memory_true(readings: GpuReadings, processes: ProcessReadings | Failure) -> bool:
    """Return whether the memory NVML lists for a pid belongs to that process."""
    return _has_same_pids(processes, readings, _DRIVER_TRANSLATES_MEMORY)


def _follow(
    state: AttributionState, readings: GpuReadings, processes: ProcessReadings | Failure
) -> AttributionState:
    """Return where the engine runs now; one that frees its devices one by one is not a new engine."""
    if isinstance(processes, Failure):
        return state
    state = replace(state, ambiguous=processes.ambiguous_roots > 0)
    if not are_pids_true(readings, processes):
        return state
    engine = {
        process.pid: (process.pid, process.started_at_seconds) for process in processes.engine
    }
    on_devices = {each.pid for device in readings.devices for each in device.processes or ()}
    ended = frozenset(pid for pid in state.ours if not is_alive(pid, processes))
    ours = ended | processes.orphans | engine.keys()
    state = replace(state, ours=ours & on_devices)
    found = [
        (device.uuid, each)
        for device in readings.devices
        for each in device.processes or ()
        if each.pid in engine
    ]
    if not found:
        return state
    devices = frozenset(uuid for uuid, _ in found)
    holders = frozenset(engine[each.pid] for _, each in found)
    is_reported = any(each.used_bytes is not None for _, each in found)
    return replace(
        state,
        remembered=devices | state.remembered if holders & state.holders else devices,
        holders=holders,
        ledger_opened=state.ledger_opened
        or (is_reported and is_process_memory_true(readings, processes)),
    )


def _has_same_pids(
    processes: ProcessReadings | Failure, readings: GpuReadings, driver_needed: tuple[int, int, int]
) -> bool:
    if isinstance(processes, Failure):
        return False
    if processes.sees_host_pids or all(device.vendor is Vendor.AMD for device in readings.devices):
        return (
            True  # of AMD's GPUs only such processes are listed as /proc shows under the same pid
        )
    try:
        version = tuple(int(part) for part in (readings.driver_version or "").split("."))
    except ValueError:
        return False
    return version >= driver_needed


def _attribute_device(
    device: GpuReading, state: AttributionState, selection: Selection, *, devices: int
) -> Attribution | None:
    if selection.everything:
        return Attribution.ASSUMED
    if selection.listed:
        names = {device.uuid.casefold(), str(state.indices.get(device.uuid, device.index))}
        return Attribution.UUID if names & {name.casefold() for name in selection.listed} else None
    if state.remembered:
        return Attribution.PROCESS if device.uuid in state.remembered else None
    return Attribution.SINGLE if devices == 1 else None


def _split_memory(
    device: GpuReading, processes: ProcessReadings | Failure | None, engine_pids: frozenset[int]
) -> tuple[int | None, int | None]:
    """Return the bytes held by the engine's processes and by other live ones; the rest is unattributed."""
    if (
        not isinstance(processes, ProcessReadings)
        or device.processes is None
        or device.memory is None
    ):
        return None, None
    others = [
        each
        for each in device.processes
        if each.pid not in engine_pids and is_alive(each.pid, processes)
    ]
    engine_bytes = sum_known(
        (0, *(each.used_bytes for each in device.processes if each.pid in engine_pids))
    )
    other_bytes = sum_known((0, *(each.used_bytes for each in others)))
    used_bytes = device.memory.used_bytes
    if (engine_bytes or 0) + (other_bytes or 0) > used_bytes + _RACE_BYTES:
        return None, None
    if engine_bytes is not None:
        engine_bytes = min(engine_bytes, used_bytes)
    if other_bytes is not None:
        other_bytes = min(other_bytes, used_bytes - (engine_bytes or 0))
    return engine_bytes, other_bytes
