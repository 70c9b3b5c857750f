"""Decide which of the probe's files belong to this run of the engine."""

from typing import Final

from vllm_headroom.model import (
    SAME_START_SECONDS,
    EngineProcess,
    Failure,
    ProbedProcess,
    ProbeReadings,
)

FRESH_INTERVALS: Final = 3
"""A file is fresh until this many of its write intervals have passed. This time is limited by the
two constants below.
"""

SHORTEST_FRESH_SECONDS: Final = 10.0
LONGEST_FRESH_SECONDS: Final = 300.0

AHEAD_SECONDS: Final = 60.0
"""A file dated further in the future than this is ignored. The probe and the daemon share a clock.
"""


def classify_probe(
    files: tuple[ProbedProcess, ...] | Failure | None,
    processes: tuple[EngineProcess, ...] | Failure,
    now: float,
) -> ProbeReadings | Failure | None:
    """Sort the probe's files, as of `now` in epoch seconds, into present, silent and others.

    While /proc shows engine processes, the start times of writers are compared. A file belongs to
    this run if a process has the same start time. Pids are not compared, because they may belong to
    another PID namespace. While /proc shows no engine process, fresh files belong to this run. A
    failure or None is returned unchanged.
    """
    if files is None or isinstance(files, Failure):
        return files
    shown = () if isinstance(processes, Failure) else processes
    present = []
    silent = []
    others = []
    for file in _list_newest(files, now):
        is_running = any(_is_same_process(file, process) for process in shown)
        # If no process is visible, a fresh file proves that its process is running.
        may_run = is_running or not shown
        if file.stopped is not None:
            others.append(file)
        elif may_run and now - file.written_at_seconds <= _measure_fresh_seconds(file):
            present.append(file)
        elif is_running:
            silent.append(file)
        else:
            others.append(file)
    return ProbeReadings(present=tuple(present), silent=tuple(silent), others=tuple(others))


def _list_newest(files: tuple[ProbedProcess, ...], now: float) -> list[ProbedProcess]:
    """Return the newest file of each process, sorted by age with the oldest first."""
    newest = {}
    # A file is identified by its content, because its name is not trusted.
    for file in sorted(files, key=lambda file: file.written_at_seconds):
        if file.written_at_seconds <= now + AHEAD_SECONDS:
            newest[file.pid, file.started_at_seconds] = file
    return list(newest.values())


def _is_same_process(file: ProbedProcess, process: EngineProcess) -> bool:
    """Return whether the starts agree in boot time, or nearly agree in wall-clock time."""
    boot_seconds = file.since_boot_seconds
    if boot_seconds is not None and boot_seconds == process.since_boot_seconds:
        return True
    difference_seconds = abs(file.started_at_seconds - process.started_at_seconds)
    return difference_seconds <= SAME_START_SECONDS


def _measure_fresh_seconds(file: ProbedProcess) -> float:
    """Return how many seconds a file stays fresh after it was written."""
    fresh_seconds = max(SHORTEST_FRESH_SECONDS, FRESH_INTERVALS * file.interval_seconds)
    return min(fresh_seconds, LONGEST_FRESH_SECONDS)
