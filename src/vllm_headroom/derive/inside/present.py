"""Which of the probe's files speak of the engine as it is now?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from vllm_headroom.model import SAME_START_SECONDS, EngineProcess, Failure, ProbedProcess, ProbeReadings

INTERVALS: Final = 3
LEAST_SECONDS: Final = 10.0
MOST_SECONDS: Final = 300.0
"""A file is fresh for three of its own intervals, which it may state as it likes."""

AHEAD_SECONDS: Final = 60.0
"""The clock is the same machine's: what is dated further ahead is not believed, and stands for nothing."""


def told(
    files: tuple[ProbedProcess, ...] | Failure | None, processes: tuple[EngineProcess, ...] | Failure, now: float
) -> ProbeReadings | Failure | None:
    """Return what the probe says at `now`, in seconds since the epoch.

    Where the engine's processes show in /proc, a file is of this life if one of them began when its process did; pids
    may be those of another namespace, and a clock that was set between two looks at it dates a start anew. Where none
    shows, only its date can tell.
    """
    if files is None or isinstance(files, Failure):
        return files
    shown = () if isinstance(processes, Failure) else processes
    present, silent, others = [], [], []
    for each in _newest_of_each(each for each in files if each.written_at_seconds <= now + AHEAD_SECONDS):
        alive = any(_is_of(each, process) for process in shown)
        if each.stopped is None and (alive or not shown) and _is_fresh(each, now):
            present.append(each)
        elif each.stopped is None and alive:
            silent.append(each)
        else:
            others.append(each)
    return ProbeReadings(present=tuple(present), silent=tuple(silent), others=tuple(others))


def _is_of(file: ProbedProcess, process: EngineProcess) -> bool:
    if file.since_boot_seconds is not None and file.since_boot_seconds == process.since_boot_seconds:
        return True
    return abs(file.started_at_seconds - process.started_at_seconds) <= SAME_START_SECONDS


def _is_fresh(process: ProbedProcess, now: float) -> bool:
    lasts = min(max(LEAST_SECONDS, INTERVALS * process.interval_seconds), MOST_SECONDS)
    return now - process.written_at_seconds <= lasts


def _newest_of_each(files: Iterable[ProbedProcess]) -> tuple[ProbedProcess, ...]:
    """Return one file of each process: a name does not have to be true."""
    newest: dict[tuple[int, float], ProbedProcess] = {}
    for each in sorted(files, key=lambda each: each.written_at_seconds):
        newest[each.pid, each.started_at_seconds] = each
    return tuple(newest.values())
