"""Who holds memory of a GPU and serves no engine any more?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from vllm_headroom.model import Fate, Gpu, GpuProcess, Leftover, ProcessReadings
from vllm_headroom.units import size

_FIRST: Final = 1

WHO: Final = {
    Fate.ORPHANED: "left behind by an engine that has ended",
    Fate.ZOMBIE: "which has ended and hangs in the driver",
    Fate.VANISHED: "which no longer exists",
}
WHAT_TO_DO: Final = {
    Fate.ORPHANED: "end it with kill {pid}, or kill -9 {pid}",
    Fate.ZOMBIE: "no signal helps; restart its container or parent, else reset the GPU or reboot the node",
    Fate.VANISHED: "the driver gives it back within a minute, or keeps it until the GPU is reset",
}


def leftovers(
    listed: Iterable[GpuProcess], processes: ProcessReadings, ours: frozenset[int], *, memory_is_true: bool
) -> Iterator[Leftover]:
    """Yield the processes on a device, which NVML and /proc know by the same pids, that are sure to be left over.

    `ours` are the engine's processes of before.
    """
    for process in listed:
        fate = _fate(process.pid, processes, ours)
        if fate is not None:
            yield Leftover(pid=process.pid, fate=fate, used_bytes=process.used_bytes if memory_is_true else None)


def is_alive(pid: int, processes: ProcessReadings) -> bool:
    """Tell whether a pid has a process in which something runs."""
    return pid in processes.visible_pids and pid not in processes.zombies


def described(leftover: Leftover) -> str:
    """Return what it holds, whose that is and what to do."""
    held = "an unknown share" if leftover.used_bytes is None else size(leftover.used_bytes)
    pid = f"pid {leftover.pid}, " if leftover.pid else "a process "
    what_to_do = WHAT_TO_DO[leftover.fate].format(pid=leftover.pid or "PID")
    return f"{held} held by {pid}{WHO[leftover.fate]}: {what_to_do}"


def of_no_gpu(orphans: frozenset[int], gpus: Iterable[Gpu]) -> str | None:
    """Return what is said of the orphans that no GPU has among its leftovers, None where there are none."""
    pids = [str(pid) for pid in sorted(orphans - {left.pid for gpu in gpus for left in gpu.leftovers})]
    if not pids:
        return None
    what_to_do = WHAT_TO_DO[Fate.ORPHANED].format(pid=" ".join(pids))
    who = f"pid {pids[0]} is" if len(pids) == 1 else f"pids {', '.join(pids)} are"
    return f"{who} {WHO[Fate.ORPHANED]}: {what_to_do}"


def _fate(pid: int, processes: ProcessReadings, ours: frozenset[int]) -> Fate | None:
    """Return what became of a process; None where it lives, or may.

    One that never was seen is missed only where all processes of the machine show: without pid 1 some are hidden.
    """
    if pid in processes.left_behind:
        return Fate.ORPHANED
    if pid in processes.zombies:
        return Fate.ZOMBIE
    sees_all = processes.sees_host_pids and _FIRST in processes.visible_pids
    missing = pid not in processes.visible_pids
    return Fate.VANISHED if missing and (sees_all or pid in ours) else None
