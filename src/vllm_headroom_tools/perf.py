"""Use perf to record where processes first touch memory, including in native code."""

import asyncio
import contextlib
import shutil
import signal
from asyncio.subprocess import DEVNULL, PIPE
from collections import Counter
from collections.abc import Collection
from tempfile import TemporaryDirectory
from typing import Any, Final

FAULTS_PER_STACK: Final = 256
"""perf records the stack of every 256th page fault. With 4 KiB pages, this is once per MiB."""

RECORD_COMMAND: Final = (
    f"record --quiet --event page-faults:u --count {FAULTS_PER_STACK}"
    " --call-graph dwarf,4096 --max-size 64M"
)
"""The command limits the size of perf's file. After about 15 GiB of new pages, perf stops
recording.
"""

SCRIPT_COMMAND: Final = "script --no-inline --fields pid,ip,sym,dso"

RECORDED_STATUSES: Final = (0, 130, -signal.SIGINT)
"""perf's exit statuses after a recording that ended normally or was interrupted."""

PERF_END_SECONDS: Final = 120.0
"""The time limit for perf to exit after an interrupt. perf unwinds the stacks during this time."""

MAX_STACKS: Final = 20
"""The number of stacks per process in the report. These are the stacks with the most faults."""

MAX_FAULT_FRAMES: Final = 16
"""The number of frames per stack in the report. These are the frames closest to the page fault."""

Faults = dict[int, list[dict[str, Any]]]
"""The stacks that touched the most new pages, by pid.

A stack is `{"faults": pages, "stack": frames}`. The first frame is the one that touched the page.
"""


async def record_faults(pids: Collection[int] | None, seconds: float) -> tuple[Faults, str | None]:
    """Record where the processes touch new pages for `seconds`.

    Returns the faults and None. If recording fails, returns no faults and the reason. If `pids` is
    None, records nothing and returns no faults and None. If the call is cancelled, perf is killed
    and its file is removed.
    """
    if pids is None:
        return {}, None
    if not pids:
        return {}, "vLLM's processes are not visible here"
    perf = shutil.which("perf")
    if perf is None:
        return {}, "perf is not installed here"
    try:
        with TemporaryDirectory(prefix="headroom-perf-") as folder:
            file = f"{folder}/data"
            targets = ("--output", file, "--pid", ",".join(map(str, pids)))
            status, output = await _run(seconds, perf, *RECORD_COMMAND.split(), *targets)
            # Our interrupt makes perf exit with a nonzero status.
            if status not in RECORDED_STATUSES:
                return {}, f"perf: {_find_problem(output) or f'status {status}'}"
            _, script = await _run(PERF_END_SECONDS, perf, *SCRIPT_COMMAND.split(), "--input", file)
            return count_faults(script), None
    except OSError as error:  # includes TimeoutError, which has no strerror
        return {}, f"perf: {error.strerror or 'its record took too long to read'}"


def _find_problem(output: str) -> str | None:
    """Return the first line of perf's output that describes a problem.

    Returns None for empty output.
    """
    for line in output.splitlines():
        if line.strip() not in {"", "Error:"}:
            return line.strip()
    return None


async def _run(seconds: float, *words: str) -> tuple[int | None, str]:
    """Run a program, interrupt it after `seconds`, and return its exit status and output.

    The output is standard output or, if that is empty, standard error. If the program ignores the
    interrupt, it is killed, and TimeoutError is raised.
    """
    process = await asyncio.create_subprocess_exec(*words, stdin=DEVNULL, stdout=PIPE, stderr=PIPE)
    try:
        # The program is interrupted after the first wait. The second wait gives it time to exit.
        for timeout_seconds in (seconds, PERF_END_SECONDS):
            with contextlib.suppress(TimeoutError):
                out, err = await asyncio.wait_for(process.communicate(), timeout_seconds)
                return process.returncode, (out or err).decode(errors="replace")
            # On an interrupt, perf writes what it has recorded and exits.
            process.send_signal(signal.SIGINT)
        raise TimeoutError
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def count_faults(script: str) -> Faults:
    """Count the faults of each stack in the output of `perf script`.

    The output has one paragraph per sample. The first line of a paragraph contains the pid. Each
    further line contains a frame's address, symbol and file. Paragraphs in any other form are
    skipped.
    """
    counts: dict[int, Counter[tuple[str, ...]]] = {}
    for sample in script.split("\n\n"):
        pid, *frames = map(str.strip, sample.strip().split("\n"))
        if not pid.isdecimal() or not frames:
            continue
        stack = tuple(map(_format_frame, frames[:MAX_FAULT_FRAMES]))
        counts.setdefault(int(pid), Counter())[stack] += FAULTS_PER_STACK
    return {pid: _list_stacks(stack_counts) for pid, stack_counts in counts.items()}


def _list_stacks(counts: Counter[tuple[str, ...]]) -> list[dict[str, Any]]:
    return [
        {"faults": faults, "stack": list(stack)} for stack, faults in counts.most_common(MAX_STACKS)
    ]


def _format_frame(frame: str) -> str:
    """Return a frame as "symbol (file)", without the address and the file's folder."""
    _address, _, location = frame.partition(" ")
    symbol, _, file = location.replace(" (deleted)", "").rpartition(" (")
    _folder, _, file_name = file.removesuffix(")").rpartition("/")
    return f"{symbol or '[unknown]'} ({file_name})"
