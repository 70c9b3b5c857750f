"""Make the probes of a running vLLM record who allocates, and read their answers."""

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
"""The largest number of stacks that an answer may have for each kind of memory."""

MAX_FRAMES: Final = 16
"""The largest number of frames of a stack."""

ProcessAnswer = dict[str, Any]
"""A process's answer in the form of --json: a `note`, the `cost`, and the `host` and `gpu` stacks
that hold most memory.

`bytes` of a stack is the memory that was allocated there during the recording and is still held.
The first frame of a stack is the line that allocated the memory. The cost is what the recording
took from the process; `pause_seconds` is the time for which the process stood still at the end.
"""


def parse_answer(content: bytes, request_id: str) -> ProcessAnswer | str | None:
    """Parse the answer to a request.

    Returns None for the answer to another request. Returns a text on the problem if the answer
    cannot be used.
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
    """Return whether a document, in this version of the format, is an answer to this request."""
    if type(document) is not dict:
        return False
    return document.get(RECORD_FORMAT) == RECORD_VERSION and document.get("id") == request_id


def _parse_stack(entry: dict[str, Any], _place: int) -> dict[str, Any]:
    """Return a stack with its bytes and allocations; raise WrongFieldError for bad frames."""
    frames = entry.get("stack")
    if type(frames) is not list or not all(map(_is_printable_text, frames)):
        raise WrongFieldError("stack", frames, "a list of files and lines")
    return {
        "bytes": fields.read_size(entry, "bytes") or 0,
        "count": fields.read_size(entry, "count") or 0,
        "stack": frames[:MAX_FRAMES],
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
"""The file in the probe's folder that asks for a recording."""

NO_ANSWER: Final = "no answer"

TOUCH_SECONDS: Final = 5.0
"""The time after which the request's file is touched again. A request that was not touched for a
minute has no reader any more, and the probes stop its recording.
"""

POLL_SECONDS: Final = 0.5

RECORD_ANSWER_SECONDS: Final = 60.0
"""The longest wait for answers after the end of the recording: the probes look for the end every
five seconds, and take seconds to add up the stacks.
"""

MAX_ANSWER_BYTES: Final = 256 * 1024

PROBE_FILES_SECONDS: Final = 5.0
"""The limit for reading the files of all probes."""

MAPPINGS_SECONDS: Final = 10.0
"""The limit for reading the mappings of one process."""

KINDS: Final = ("host", "gpu")
"""The kinds of memory that can be recorded.

Host memory is far more expensive to record, because Python then stores the stack of every
allocation.
"""


async def record(
    folder: Path, seconds: float, say: Callable[[str], None], kinds: Collection[str] = KINDS
) -> dict[str, Any]:
    """Make all processes record these kinds of memory for some seconds; return the data of --json.

    A process without a usable answer has a `problem`, and its figures are None. Raises BadInput if
    there is no process, while another recording runs, or if the folder cannot be written. If this
    call is cancelled or killed, the probes stop recording within a minute.
    """
    processes = await find_processes(folder)
    # The stacks contain what Python and torch allocate. Two other sources also cover native code:
    # the growth of the kernel's mappings during the recording, and perf.
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
            # Once the request is gone, the probes stop at once.
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
    """Return the processes whose probes now write to the folder; raise BadInput without any."""
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
    """Return the bytes by which each kind of mapping has grown, by process.

    A process is absent if its mappings could not be read at both times.
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
    """Return the data of --json on a process.

    If `answer` is a text, it is the problem, and the figures of the answer are None.
    """
    # The keys are the same with and without an answer, so that programs can rely on them.
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
    """Return the bytes of a process's memory, by kind of mapping.

    Returns None if the mappings cannot be read here. The probe reports the pid in the process's own
    PID namespace. If that pid is another process here, the mappings count as not readable.
    """

    def read() -> dict[str, int] | None:
        """Return the process's memory by its mapping; None once another process has the PID."""
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
    """Write the file that asks the probes for a recording.

    Raises BadInput while another recording runs, because that recording touched its request
    recently. Raises OSError if the file cannot be written.
    """
    path = folder / REQUEST
    with contextlib.suppress(FileNotFoundError):
        age_seconds = time.time() - path.lstat().st_mtime
        # An older file belongs to a command that was killed. abs: the clock may have been set back.
        if abs(age_seconds) < 2 * TOUCH_SECONDS:
            raise BadInput(f"{path} is another recording's, which is running")
    document: dict[str, Any] = {
        RECORD_FORMAT: RECORD_VERSION,
        "id": request_id,
        "until": until_seconds,
    }
    for kind in KINDS:
        document[kind] = kind in kinds
    # The file gets its name only when it is complete, so that a probe never reads half a request.
    unfinished = folder / f".{REQUEST}.{request_id}"
    unfinished.write_text(json.dumps(document))
    unfinished.chmod(0o644)
    unfinished.replace(path)


async def _collect_answers(
    folder: Path, processes: Iterable[ProbedProcess], request_id: str, deadline_seconds: float
) -> dict[ProbedProcess, ProcessAnswer | str]:
    """Wait for the answers of all processes until the deadline, and keep touching the request.

    Returns the answers by process; a process that has not answered is absent. A text on the problem
    replaces an answer that cannot be used.
    """
    # A pid may be used again, but not with the same start time in seconds.
    file_names = {
        process: f"{process.pid}-{int(process.started_at_seconds)}.record.json"
        for process in processes
    }
    answers: dict[ProbedProcess, ProcessAnswer | str] = {}
    touched_at_seconds = 0.0
    while len(answers) < len(file_names) and time.time() < deadline_seconds:
        if time.time() - touched_at_seconds >= TOUCH_SECONDS:
            # vLLM's container can write here too, and a link must not lead to another file.
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
