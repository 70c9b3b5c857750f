"""Make the probes write snapshots of torch's memory, and report on them."""

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from vllm_headroom.model import AllocatorSnapshot, LineHolding, ProbedProcess
from vllm_headroom.trace.incident import HeldLine
from vllm_headroom.units import format_instant, format_size
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.conclusion import Conclusion, Report, find_worst
from vllm_headroom_tools.probe.record import NO_ANSWER, find_processes
from vllm_headroom_tools.probe.report import list_problems, name_process
from vllm_headroom_tools.probe.snapshot_file import ReadSnapshot

REQUEST: Final = "snapshot.json"
"""The file in the probe's folder that requests a snapshot."""

REQUEST_FORMAT: Final = "headroom_snapshot"
REQUEST_VERSION: Final = 1

SNAPSHOT_SECONDS: Final = 30.0
"""The maximum time to wait for answers. The probes check for requests every five seconds. Writing a
snapshot takes at most ten seconds.
"""

POLL_SECONDS: Final = 0.5

NO_HISTORY: Final = (
    "no process keeps torch's memory history: set HEADROOM_PROBE_SNAPSHOT in vLLM's environment to"
    " a folder that vLLM can write; where vLLM may sleep, none is kept"
)


async def take_snapshots(folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Make all processes with torch's history write a snapshot; return the --json data.

    A process that has not answered in time has a `problem`. Raises BadInput if no process keeps the
    history, or if the folder cannot be written.
    """
    processes = [process for process in await find_processes(folder) if process.history is not None]
    if not processes:
        raise BadInput(NO_HISTORY)
    request_id = uuid.uuid4().hex
    deadline_seconds = time.time() + SNAPSHOT_SECONDS
    document = {REQUEST_FORMAT: REQUEST_VERSION, "id": request_id, "until": deadline_seconds}
    # The file is renamed once it is complete. A probe never reads a partial request.
    unfinished = folder / f".{REQUEST}.{request_id}"
    try:
        unfinished.write_text(json.dumps(document))
        unfinished.chmod(0o644)
        unfinished.replace(folder / REQUEST)
        plural = "process writes" if len(processes) == 1 else "processes write"
        say(f"{len(processes)} {plural} a snapshot")
        try:
            answers = await _collect_answers(folder, processes, request_id, deadline_seconds)
        finally:
            with contextlib.suppress(FileNotFoundError):
                (folder / REQUEST).unlink()
    except OSError as error:
        raise BadInput(f"{error.filename or folder}: {error.strerror or error}") from error
    return {
        "folder": str(folder),
        "snapshots": [_describe_answer(process, answers.get(process.pid)) for process in processes],
    }


async def _collect_answers(
    folder: Path, processes: Iterable[ProbedProcess], request_id: str, deadline_seconds: float
) -> dict[int, AllocatorSnapshot]:
    """Wait for the snapshots of all processes until the deadline; return them by pid."""
    missing_pids = {process.pid for process in processes}
    answers: dict[int, AllocatorSnapshot] = {}
    while missing_pids and time.time() < deadline_seconds:
        await asyncio.sleep(POLL_SECONDS)
        # `find_processes` raises BadInput if all processes have exited in the meantime.
        with contextlib.suppress(BadInput):
            for process in await find_processes(folder):
                snapshot = None if process.history is None else process.history.requested
                if snapshot is not None and snapshot.request_id == request_id:
                    answers[process.pid] = snapshot
        missing_pids -= answers.keys()
    return answers


def _describe_answer(process: ProbedProcess, snapshot: AllocatorSnapshot | None) -> dict[str, Any]:
    """Return the --json data about a process.

    Without an answer, the figures are None.
    """
    if snapshot is None:
        snapshot = AllocatorSnapshot(at_seconds=0.0, file="", problem=NO_ANSWER)
    return {
        "pid": process.pid,
        "role": process.role,
        "problem": snapshot.problem,
        "file": snapshot.file or None,
        "bytes": snapshot.size_bytes,
        "pause_seconds": snapshot.pause_seconds,
        "largest": [_describe_line(holding) for holding in snapshot.largest],
    }


def _describe_line(holding: LineHolding) -> dict[str, Any]:
    """Return the memory held by one line of code, for the JSON document."""
    return {
        "file": holding.file,
        "line": holding.line,
        "bytes": holding.size_bytes,
        "count": holding.n_blocks,
        "since": holding.since_seconds,
    }


def report_taken(data: Mapping[str, Any]) -> Report:
    """Return the report on the requested snapshots, with exit status 0."""
    snapshots = data["snapshots"]
    findings = list_problems(snapshots)
    n_written = len(snapshots) - len(findings)
    return Report(
        verdict=find_worst(finding.verdict for finding in findings),
        headline=f"{n_written} of {len(snapshots)} processes wrote a snapshot of torch's memory.",
        findings=findings,
        data=data,
        lines=_render_taken(snapshots),
        exit_status=0,
    )


def report_read(path: Path, snapshot: ReadSnapshot) -> Report:
    """Return the report on a snapshot file, with exit status 0."""
    size = format_size(snapshot.active_bytes)
    reserved = format_size(snapshot.reserved_bytes)
    headline = f"torch held {size} in {snapshot.n_blocks:,} blocks, of {reserved} reserved."
    largest = [_describe_line(holding) for holding in snapshot.largest]
    history = None
    if snapshot.history_from_seconds is not None:
        history = f"Its history begins {format_instant(snapshot.history_from_seconds)}."
    return Report(
        verdict=Conclusion.GOOD,
        headline=headline,
        data={
            "file": str(path),
            "active_bytes": snapshot.active_bytes,
            "reserved_bytes": snapshot.reserved_bytes,
            "blocks": snapshot.n_blocks,
            "history_from": snapshot.history_from_seconds,
            "largest": largest,
        },
        lines=[
            headline if history is None else f"{headline} {history}",
            *_render_lines(largest),
        ],
    )


def _render_taken(snapshots: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines about each snapshot: its file, or why it was not written."""
    for snapshot in snapshots:
        name = name_process(snapshot)
        if snapshot["problem"] is not None:
            yield f"{name}: {snapshot['problem']}"
        else:
            pause = ""
            if snapshot["pause_seconds"] is not None:
                pause = f", which stopped it for {snapshot['pause_seconds']:.3f} s"
            yield f"{name} wrote {snapshot['file']}{pause}:"
        yield from _render_lines(snapshot["largest"])


def _render_lines(largest: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each line of code that holds memory, largest first."""
    for held in largest:
        yield f"  {HeldLine(**held).describe()}"
