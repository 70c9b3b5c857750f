"""Make the probes of a running vLLM record allocations, and read their answers."""

import asyncio
import contextlib
import json
import os
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from vllm_headroom.derive.probe_files import classify_probe
from vllm_headroom.model import SAME_START_SECONDS, Failure, ProbedProcess, ProbeReadings
from vllm_headroom.parse import fields
from vllm_headroom.parse.fields import WrongFieldError, read_each, read_number, read_within
from vllm_headroom.parse.probe import parse_probe
from vllm_headroom.scrape.probe import ProbeReader, read_regular_file
from vllm_headroom.scrape.proc.files import read_entry
from vllm_headroom.scrape.proc.host import read_boot_time
from vllm_headroom.scrape.proc.smaps import find_growth, read_mappings
from vllm_headroom.units import format_duration
from vllm_headroom.worker import Worker
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.look import PROC
from vllm_headroom_tools.perf import Faults, record_faults

RECORD_FORMAT: Final = "headroom_record"
RECORD_VERSION: Final = 1

MAX_STACKS: Final = 20
"""The maximum number of stacks in an answer for each kind of memory."""

MAX_STACK_FRAMES: Final = 16
"""The maximum number of frames in a stack."""

ProcessAnswer = dict[str, Any]
"""A process's answer, as printed by --json: a `note`, the `cost`, and stacks. `host` and `gpu` are
the stacks that hold the most memory.

The `bytes` of a stack are the memory allocated there during the recording. Only memory that is
still held at the end counts. The first frame of a stack is the line that allocated the memory. The
cost is what the recording consumed in the process. `pause_seconds` is how long the process was
paused at the end.
"""


def parse_answer(content: bytes, request_id: str) -> ProcessAnswer | str | None:
    """Parse a process's answer to a request.

    Returns None if the content answers another request. If the content cannot be used, returns a
    message that describes the problem.
    """
    try:
        document = json.loads(content)
        if not _answers(document, request_id):
            return None
        return {
            "note": fields.read_text(document, "note"),
            "cost": read_within(document, "cost", _parse_cost) or _parse_cost({}),
            "host": list(read_each(document, "host", _parse_stack) or ())[:MAX_STACKS],
            "gpu": list(read_each(document, "gpu", _parse_stack) or ())[:MAX_STACKS],
        }
    except WrongFieldError as error:
        return str(error)
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"


def _answers(document: object, request_id: str) -> bool:
    """Return whether a document has this version of the format and answers this request."""
    if type(document) is not dict:
        return False
    return document.get(RECORD_FORMAT) == RECORD_VERSION and document.get("id") == request_id


def _parse_stack(entry: dict[str, Any], _place: int) -> dict[str, Any]:
    """Return a stack with its bytes and allocations; raise WrongFieldError for invalid frames."""
    frames = entry.get("stack")
    if type(frames) is not list or not all(map(_is_printable_text, frames)):
        raise WrongFieldError("stack", frames, "a list of files and lines")
    return {
        "bytes": fields.read_size(entry, "bytes") or 0,
        "count": fields.read_size(entry, "count") or 0,
        "stack": frames[:MAX_STACK_FRAMES],
    }


def _is_printable_text(value: object) -> bool:
    return type(value) is str and value.isprintable()


def _parse_cost(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "pause_seconds": read_number(entry, "pause_seconds"),
        "cpu_seconds": read_number(entry, "cpu_seconds"),
        "memory_bytes": fields.read_size(entry, "memory_bytes"),
    }


REQUEST: Final = "record.json"
"""The file in the probe's folder that requests a recording."""

NO_ANSWER: Final = "no answer"

TOUCH_SECONDS: Final = 5.0
"""The interval at which the request file is touched. If it is not touched for a minute, the command
has ended. The probes then stop the recording.
"""

POLL_SECONDS: Final = 0.5

RECORD_ANSWER_SECONDS: Final = 60.0
"""The maximum time to wait for answers after the end of the recording. The probes notice the end
within five seconds. Adding up the stacks takes several seconds.
"""

MAX_ANSWER_BYTES: Final = 256 * 1024

PROBE_FILES_SECONDS: Final = 5.0
"""The time limit for reading the files of all probes."""

MAPPINGS_SECONDS: Final = 10.0
"""The time limit for reading the mappings of one process."""

KINDS: Final = ("host", "gpu")
"""The kinds of memory that can be recorded.

Host memory is far more expensive to record. Python has to store the stack of every allocation.
"""


async def record(
    folder: Path, seconds: float, say: Callable[[str], None], kinds: Collection[str] = KINDS
) -> dict[str, Any]:
    """Make all processes record these kinds of memory for `seconds`; return the --json data.

    A process without a usable answer has a `problem`, and its figures are None. Raises BadInput if
    there are no processes, or if another recording is running. Also raises BadInput if the folder
    cannot be written. If this call is cancelled or killed, the probes stop recording within a
    minute.
    """
    processes = await find_processes(folder)
    # The stacks cover only allocations by Python and torch. Native code is covered by the growth of
    # the kernel's mappings, and by perf.
    mappings = {process: await _read_mappings(process) for process in processes}
    visible_pids = [process.pid for process in processes if mappings[process]]
    request_id = uuid.uuid4().hex
    until_seconds = time.time() + seconds
    try:
        _write_request(folder, request_id, until_seconds, kinds)
        say(f"{len(processes)} processes record for {format_duration(seconds)}")
        try:
            answers, (faults, no_faults) = await asyncio.gather(
                _collect_answers(
                    folder, processes, request_id, until_seconds + RECORD_ANSWER_SECONDS
                ),
                record_faults(visible_pids if "host" in kinds else None, seconds),
            )
        finally:
            # The probes stop as soon as the request is deleted.
            with contextlib.suppress(FileNotFoundError):
                (folder / REQUEST).unlink()
    except OSError as error:
        raise BadInput(f"{error.filename or folder}: {error.strerror or error}") from error
    growths = await _measure_growth(mappings)
    return {
        "folder": str(folder),
        "seconds": seconds,
        "processes": [
            _join_record(process, answers.get(process, NO_ANSWER), growths.get(process), faults)
            for process in processes
        ],
        "no_native": no_faults,
    }


async def find_processes(folder: Path) -> tuple[ProbedProcess, ...]:
    """Return the processes whose probes write to the folder; raise BadInput if there are none."""
    files = await ProbeReader(folder, parse=parse_probe).read(PROBE_FILES_SECONDS)
    if isinstance(files, Failure):
        raise BadInput(files.message)
    readings = classify_probe(files, (), time.time())
    if not isinstance(readings, ProbeReadings) or not readings.present:
        raise BadInput(
            f"no process writes into {folder} now: vLLM is down, or its probes have stopped"
        )
    return readings.present


async def _measure_growth(
    mappings: Mapping[ProbedProcess, dict[str, int] | None],
) -> dict[ProbedProcess, dict[str, int]]:
    """Return the growth of each kind of mapping in bytes, by process.

    A process is included only if both readings of its mappings succeeded.
    """
    growths = {}
    for process, old_mappings in mappings.items():
        new_mappings = await _read_mappings(process) if old_mappings else None
        if old_mappings and new_mappings:
            growths[process] = find_growth(old_mappings, new_mappings)
    return growths


def _join_record(
    process: ProbedProcess,
    answer: ProcessAnswer | str,
    growth: dict[str, int] | None,
    faults: Faults,
) -> dict[str, Any]:
    """Return the --json data about a process.

    If `answer` is a string, it describes the problem, and the answer's figures are None.
    """
    # The keys are the same with or without an answer. Programs can rely on them.
    recording: ProcessAnswer = dict.fromkeys(("note", "cost", "host", "gpu"))
    problem = None
    if isinstance(answer, str):
        problem = answer
    else:
        recording = answer
    return {
        "pid": process.pid,
        "role": process.role,
        "data_parallel_rank": process.data_parallel_rank,
        "problem": problem,
        **recording,
        "mappings": growth,
        "native": faults.get(process.pid),
    }


async def _read_mappings(process: ProbedProcess) -> dict[str, int] | None:
    """Return a process's memory in bytes, by kind of mapping.

    Returns None if the mappings cannot be read. The probe reports the pid in the process's own PID
    namespace. In the sidecar's namespace, that pid may be a different process. In that case, the
    mappings cannot be read.
    """

    def read() -> dict[str, int] | None:
        """Return the memory by kind of mapping, or None if the pid has been reused."""
        entry = read_entry(PROC, process.pid)
        if entry is None:
            return None
        started_at_seconds = read_boot_time(PROC) + entry.started_seconds
        if abs(started_at_seconds - process.started_at_seconds) > SAME_START_SECONDS:
            return None
        return read_mappings(PROC, process.pid)

    with contextlib.suppress(TimeoutError, OSError):
        return await Worker[dict[str, int] | None]("mappings").call(read, MAPPINGS_SECONDS)
    return None


def _write_request(
    folder: Path, request_id: str, until_seconds: float, kinds: Collection[str]
) -> None:
    """Write the file that requests a recording from the probes.

    Raises BadInput if a request was touched recently, because another recording is running. Raises
    OSError if the file cannot be written.
    """
    path = folder / REQUEST
    with contextlib.suppress(FileNotFoundError):
        age_seconds = time.time() - path.lstat().st_mtime
        # An older file was left by a command that was killed. The clock may have been set back, so
        # abs() is used.
        if abs(age_seconds) < 2 * TOUCH_SECONDS:
            raise BadInput(f"{path} is another recording's, which is running")
    document: dict[str, Any] = {
        RECORD_FORMAT: RECORD_VERSION,
        "id": request_id,
        "until": until_seconds,
    }
    for kind in KINDS:
        document[kind] = kind in kinds
    # The file is renamed once it is complete. A probe never reads a partial request.
    unfinished = folder / f".{REQUEST}.{request_id}"
    unfinished.write_text(json.dumps(document))
    unfinished.chmod(0o644)
    unfinished.replace(path)


async def _collect_answers(
    folder: Path, processes: Iterable[ProbedProcess], request_id: str, deadline_seconds: float
) -> dict[ProbedProcess, ProcessAnswer | str]:
    """Wait for the answers of all processes until the deadline, and keep touching the request.

    Returns the answers by process; a process that has not answered is absent. An answer that cannot
    be used is replaced by a message describing the problem.
    """
    # A pid may be reused, but not with the same start time in seconds.
    file_names = {
        process: f"{process.pid}-{int(process.started_at_seconds)}.record.json"
        for process in processes
    }
    answers: dict[ProbedProcess, ProcessAnswer | str] = {}
    touched_at_seconds = 0.0
    while len(answers) < len(file_names) and time.time() < deadline_seconds:
        if time.time() - touched_at_seconds >= TOUCH_SECONDS:
            # vLLM's container can also write to this folder. Therefore, symbolic links are not
            # followed.
            os.utime(folder / REQUEST, follow_symlinks=False)
            touched_at_seconds = time.time()
        for process, file_name in file_names.items():
            if process in answers:
                continue
            content = read_regular_file(folder, file_name, MAX_ANSWER_BYTES)
            answer = None if content is None else parse_answer(content, request_id)
            if answer is not None:
                answers[process] = answer
        await asyncio.sleep(POLL_SECONDS)
    return answers
