"""Where processes use new memory, in native code too, recorded by perf."""

import asyncio
import contextlib
import shutil
import signal
from asyncio.subprocess import DEVNULL, PIPE
from collections import Counter
from collections.abc import Collection, Iterator
from tempfile import TemporaryDirectory
from typing import Any, Final

EVERY: Final = 256
RECORD: Final = (
    f"record --quiet --event page-faults:u --count {EVERY} --call-graph dwarf,4096 --max-size 64M"
)
"""A stack at every 256th first use of a page, 1 MiB of pages of 4 KiB; perf ends by itself after some 15 GiB."""
SCRIPT: Final = "script --no-inline --fields pid,ip,sym,dso"
ENDED: Final = (0, 130, -signal.SIGINT)
"""Statuses of perf after it recorded: by itself, or interrupted."""
END_SECONDS: Final = 120.0
"""Stacks are unwound at the end."""
MOST_STACKS, MOST_FRAMES = 20, 16

Faults = dict[int, list[dict[str, Any]]]
"""By pid the stacks that used most new pages, with their number of `faults`; the line itself is first."""


async def record_faults(pids: Collection[int] | None, seconds: float) -> tuple[Faults, str | None]:
    """Return where the processes used new pages, and why that is missing, None where it is not, and for no pids at all.

    When cancelled, perf is killed and its file removed.
    """
    perf = shutil.which("perf")
    if not pids:
        return {}, None if pids is None else "vLLM's processes are not visible here"
    if perf is None:
        return {}, "perf is not installed here"
    try:
        with TemporaryDirectory(prefix="headroom-perf-") as folder:
            file, watched = f"{folder}/data", ",".join(map(str, pids))
            status, said = await _run(
                seconds, perf, *RECORD.split(), "--output", file, "--pid", watched
            )
            if status not in ENDED:
                lines = (line.strip() for line in said.splitlines())
                return (
                    {},
                    f"perf: {next((line for line in lines if line not in ('', 'Error:')), f'status {status}')}",
                )
            return count_faults(
                (await _run(END_SECONDS, perf, *SCRIPT.split(), "--input", file))[1]
            ), None
    except (OSError, TimeoutError) as error:
        return {}, f"perf: {getattr(error, 'strerror', None) or 'its record took too long to read'}"


async def _run(seconds: float, *words: str) -> tuple[int | None, str]:
    """Run a program, interrupted after this time; return its status and what it wrote."""
    process = await asyncio.create_subprocess_exec(*words, stdin=DEVNULL, stdout=PIPE, stderr=PIPE)
    try:
        for each in (seconds, END_SECONDS):
            with contextlib.suppress(TimeoutError):
                out, said = await asyncio.wait_for(process.communicate(), each)
                return process.returncode, (out or said).decode(errors="replace")
            process.send_signal(signal.SIGINT)
        raise TimeoutError
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def count_faults(script: str) -> Faults:
    """Return the stacks of perf's text, a paragraph per sample: a pid, and frames of address, symbol and file."""
    counts: dict[int, Counter[tuple[str, ...]]] = {}
    for sample in script.split("\n\n"):
        pid, *frames = map(str.strip, sample.strip().split("\n"))
        if pid.isdecimal() and frames:
            counts.setdefault(int(pid), Counter())[tuple(_read_frames(frames[:MOST_FRAMES]))] += (
                EVERY
            )
    return {
        pid: [
            {"faults": faults, "stack": list(stack)}
            for stack, faults in found.most_common(MOST_STACKS)
        ]
        for pid, found in counts.items()
    }


def _read_frames(frames: Collection[str]) -> Iterator[str]:
    for frame in frames:
        symbol, _, file = frame.partition(" ")[2].replace(" (deleted)", "").rpartition(" (")
        yield f"{symbol or '[unknown]'} ({file.removesuffix(')').rpartition('/')[2]})"
