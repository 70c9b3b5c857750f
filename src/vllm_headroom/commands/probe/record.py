"""Asks the probes for a recording, waits for it, and reads what they answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from vllm_headroom.derive.inside.present import told
from vllm_headroom.model import Failure, ProbedProcess, ProbeReadings
from vllm_headroom.parse.fields import WrongFieldError, each, number, size, text, within
from vllm_headroom.parse.probe import parse_probe
from vllm_headroom.scrape.probe import Probe, content
from vllm_headroom.trace.errors import BadInput
from vllm_headroom.units import duration

FORMAT: Final = "headroom_record"
VERSION: Final = 1
MOST_STACKS: Final = 20
MOST_FRAMES: Final = 16


Recording = dict[str, Any]
"""A process's answer, as --json has it: a `note`, the `cost`, and the stacks of `host` and `gpu` that hold most.

A stack has all `bytes` that are still held of what was allocated there; the line itself is first. The cost is what the
recording took of its process: `pause_seconds` is how long it stood still at the end.
"""


def parse_answer(content: bytes, request: str) -> Recording | str | None:
    """Return the answer to the request of this id, None where it answers another, or what is wrong with it."""
    try:
        document = json.loads(content)
        if type(document) is not dict or document.get(FORMAT) != VERSION or document.get("id") != request:
            return None
        return {
            "note": text(document, "note"),
            "cost": within(document, "cost", _cost) or _cost({}),
            "host": list(each(document, "host", _stack) or ())[:MOST_STACKS],
            "gpu": list(each(document, "gpu", _stack) or ())[:MOST_STACKS],
        }
    except WrongFieldError as wrong:
        return str(wrong)
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"


def _stack(entry: dict[str, Any], _place: int) -> dict[str, Any]:
    frames = entry.get("stack")
    if type(frames) is not list or not all(type(frame) is str and frame.isprintable() for frame in frames):
        raise WrongFieldError("stack", frames, "a list of files and lines")
    return {"bytes": size(entry, "bytes") or 0, "count": size(entry, "count") or 0, "stack": frames[:MOST_FRAMES]}


def _cost(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "pause_seconds": number(entry, "pause_seconds"),
        "cpu_seconds": number(entry, "cpu_seconds"),
        "memory_bytes": size(entry, "memory_bytes"),
    }


REQUEST: Final = "record.json"
NO_ANSWER: Final = "no answer"
READ_SECONDS: Final = 5.0
TOUCH_SECONDS: Final = 5.0
"""The probes end what nobody has waited for in the last minute."""
POLL_SECONDS: Final = 0.5
ANSWER_SECONDS: Final = 60.0
"""From the end to the answers: the probes look every five seconds, and count for seconds."""
MOST_BYTES: Final = 256 * 1024


async def record(folder: Path, seconds: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Have all processes record for so long; raise BadInput where there is none, or another recording is running.

    What is returned is what --json prints; a process without a usable answer has null for what it did not say.

    Where this ends early, cancelled or killed, the probes stop recording within a minute.
    """
    processes = await _present(folder)
    request, until = uuid.uuid4().hex, time.time() + seconds
    try:
        _ask(folder, request, until)
        say(f"{len(processes)} processes record for {duration(seconds)}")
        try:
            answers = await _answers(folder, processes, request, until + ANSWER_SECONDS)
        finally:
            with contextlib.suppress(FileNotFoundError):
                (folder / REQUEST).unlink()
    except OSError as error:
        raise BadInput(f"{error.filename or folder}: {error.strerror or error}") from error
    processes_told = [_told(process, answers.get(process)) for process in processes]
    return {"folder": str(folder), "seconds": seconds, "processes": processes_told}


def _told(process: ProbedProcess, answer: Recording | str | None) -> dict[str, Any]:
    return {
        "pid": process.pid,
        "role": process.role,
        "data_parallel_rank": process.data_parallel_rank,
        "problem": None if isinstance(answer, dict) else answer or NO_ANSWER,
        **(answer if isinstance(answer, dict) else dict.fromkeys(("note", "cost", "host", "gpu"))),
    }


async def _present(folder: Path) -> tuple[ProbedProcess, ...]:
    files = await Probe(folder, parse=parse_probe).read(READ_SECONDS)
    if isinstance(files, Failure):
        raise BadInput(files.message)
    found = told(files, (), time.time())
    if not isinstance(found, ProbeReadings) or not found.present:
        raise BadInput(f"no process writes into {folder} now: vLLM is down, or its probes have stopped")
    return found.present


def _ask(folder: Path, request: str, until: float) -> None:
    """Write the request, unless there is one that somebody waits for; raise OSError, and BadInput."""
    path = folder / REQUEST
    with contextlib.suppress(FileNotFoundError):
        if abs(time.time() - path.lstat().st_mtime) < 2 * TOUCH_SECONDS:
            raise BadInput(f"{path} is another recording's, which is running")
    document = {"headroom_record": 1, "id": request, "until": until, "host": True, "gpu": True}
    unfinished = folder / f".{REQUEST}.{request}"
    unfinished.write_text(json.dumps(document))
    unfinished.chmod(0o644)
    unfinished.replace(path)


async def _answers(
    folder: Path, processes: Iterable[ProbedProcess], request: str, deadline: float
) -> dict[ProbedProcess, Recording | str]:
    """Wait for all answers until the deadline, and keep the request alive meanwhile; a text says what is wrong."""
    waited_for = {each: f"{each.pid}-{int(each.started_at_seconds)}.record.json" for each in processes}
    found: dict[ProbedProcess, Recording | str] = {}
    touched = 0.0
    while len(found) < len(waited_for) and time.time() < deadline:
        if time.time() - touched >= TOUCH_SECONDS:
            os.utime(folder / REQUEST, follow_symlinks=False)
            touched = time.time()
        for process, name in waited_for.items():
            written = None if process in found else content(folder, name, MOST_BYTES)
            if written is not None and (answer := parse_answer(written, request)) is not None:
                found[process] = answer
        await asyncio.sleep(POLL_SECONDS)
    return found
