"""The command `probe`: puts the probe where vLLM finds it, or has it record who allocates."""

import asyncio
import contextlib
import importlib.util
import json
import os
import shutil
import time
import uuid
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Final

from vllm_headroom.config import Settings
from vllm_headroom.derive.probe_files import classify_probe
from vllm_headroom.model import SAME_START_SECONDS, Failure, ProbedProcess, ProbeReadings
from vllm_headroom.parse import fields
from vllm_headroom.parse.fields import WrongFieldError, read_each, read_number, read_within
from vllm_headroom.parse.probe import parse_probe
from vllm_headroom.scrape.probe import ProbeReader, read_content
from vllm_headroom.scrape.proc.files import read_entry
from vllm_headroom.scrape.proc.host import read_boot_time
from vllm_headroom.scrape.proc.smaps import find_growth, read_mappings
from vllm_headroom.units import format_duration, format_size
from vllm_headroom.worker import Worker
from vllm_headroom_tools.cli import Command, write_note
from vllm_headroom_tools.conclusion import Conclusion, Finding, Report, find_worst
from vllm_headroom_tools.look import PROC
from vllm_headroom_tools.options import DURATION, FILE, BadOptions, Parser, Value, bounded, choice
from vllm_headroom_tools.perf import record_faults
from vllm_headroom_tools.trace import BadInput

FORMAT: Final = "headroom_record"
VERSION: Final = 1
MOST_STACKS: Final = 20
Recording = dict[str, Any]
"""A process's answer, as --json has it: a `note`, the `cost`, and the stacks of `host` and `gpu` that hold most.

A stack has all `bytes` that are still held of what was allocated there; the line itself is first. The cost is what the
recording took of its process: `pause_seconds` is how long it stood still at the end.
"""


def parse_answer(content: bytes, request: str) -> Recording | str | None:
    """Return the answer to the request of this id, None where it answers another, or what is wrong with it."""
    try:
        document = json.loads(content)
        if (
            type(document) is not dict
            or document.get(FORMAT) != VERSION
            or document.get("id") != request
        ):
            return None
        return {
            "note": fields.read_text(document, "note"),
            "cost": read_within(document, "cost", _parse_cost) or _parse_cost({}),
            "host": list(read_each(document, "host", _parse_stack) or ())[:MOST_STACKS],
            "gpu": list(read_each(document, "gpu", _parse_stack) or ())[:MOST_STACKS],
        }
    except WrongFieldError as wrong:
        return str(wrong)
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"


def _parse_stack(entry: dict[str, Any], _place: int) -> dict[str, Any]:
    frames = entry.get("stack")
    if type(frames) is not list or not all(
        type(frame) is str and frame.isprintable() for frame in frames
    ):
        raise WrongFieldError("stack", frames, "a list of files and lines")
    return {
        "bytes": fields.read_size(entry, "bytes") or 0,
        "count": fields.read_size(entry, "count") or 0,
        "stack": frames[:16],
    }


def _parse_cost(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "pause_seconds": read_number(entry, "pause_seconds"),
        "cpu_seconds": read_number(entry, "cpu_seconds"),
        "memory_bytes": fields.read_size(entry, "memory_bytes"),
    }


REQUEST: Final = "record.json"
NO_ANSWER: Final = "no answer"
TOUCH_SECONDS: Final = 5.0
"""The probes end what nobody has waited for in the last minute."""
POLL_SECONDS: Final = 0.5
ANSWER_SECONDS: Final = 60.0
"""From the end to the answers: the probes look every five seconds, and count for seconds."""
MOST_BYTES: Final = 256 * 1024

KINDS: Final = ("host", "gpu")
"""The memory that can be recorded. Host memory costs far more: Python notes the stack of every object."""


async def record(
    folder: Path, seconds: float, say: Callable[[str], None], kinds: Collection[str] = KINDS
) -> dict[str, Any]:
    """Have all processes record these kinds of memory; raise BadInput without one, or while another records.

    Return what --json prints; a process without a usable answer has null for what is missing.

    Where this ends early, cancelled or killed, the probes stop recording within a minute.
    """
    files = await ProbeReader(folder, parse=parse_probe).read(5.0)
    if isinstance(files, Failure):
        raise BadInput(files.message)
    found = classify_probe(files, (), time.time())
    if not isinstance(found, ProbeReadings) or not found.present:
        raise BadInput(
            f"no process writes into {folder} now: vLLM is down, or its probes have stopped"
        )
    before = {process: await _read_mappings(process) for process in found.present}
    request, until = uuid.uuid4().hex, time.time() + seconds
    try:
        _write_request(folder, request, until, kinds)
        say(f"{len(before)} processes record for {format_duration(seconds)}")
        try:
            visible = [process.pid for process, was in before.items() if was]
            answers, (faults, no_faults) = await asyncio.gather(
                _collect_answers(folder, before, request, until + ANSWER_SECONDS),
                record_faults(visible if "host" in kinds else None, seconds),
            )
        finally:
            with contextlib.suppress(FileNotFoundError):
                (folder / REQUEST).unlink()
    except OSError as error:
        raise BadInput(f"{error.filename or folder}: {error.strerror or error}") from error
    grown = {
        each: find_growth(was, now)
        for each, was in before.items()
        if was and (now := await _read_mappings(each))
    }
    recorded = []
    for process in before:
        answer = answers.get(process, NO_ANSWER)
        recorded.append(
            {
                "pid": process.pid,
                "role": process.role,
                "data_parallel_rank": process.data_parallel_rank,
                "problem": answer if isinstance(answer, str) else None,
                **(
                    dict.fromkeys(("note", "cost", "host", "gpu"))
                    if isinstance(answer, str)
                    else answer
                ),
                "mappings": grown.get(process),
                "native": faults.get(process.pid),
            }
        )
    return {
        "folder": str(folder),
        "seconds": seconds,
        "processes": recorded,
        "no_native": no_faults,
    }


async def _read_mappings(process: ProbedProcess) -> dict[str, int] | None:
    """Return the process's memory by kind of mapping; None where this pid is not the same process here."""

    def read() -> dict[str, int] | None:
        entry = read_entry(PROC, process.pid)
        began = read_boot_time(PROC) + (0 if entry is None else entry.started_seconds)
        is_same = (
            entry is not None and abs(began - process.started_at_seconds) <= SAME_START_SECONDS
        )
        return read_mappings(PROC, process.pid) if is_same else None

    with contextlib.suppress(TimeoutError, OSError):
        return await Worker[dict[str, int] | None]("mappings").call(read, 10.0)
    return None


def _write_request(folder: Path, request: str, until: float, kinds: Collection[str]) -> None:
    """Write the request, unless there is one that somebody waits for; raise OSError, and BadInput."""
    path = folder / REQUEST
    with contextlib.suppress(FileNotFoundError):
        if abs(time.time() - path.lstat().st_mtime) < 2 * TOUCH_SECONDS:
            raise BadInput(f"{path} is another recording's, which is running")
    document = {"headroom_record": 1, "id": request, "until": until} | {
        kind: kind in kinds for kind in KINDS
    }
    unfinished = folder / f".{REQUEST}.{request}"
    unfinished.write_text(json.dumps(document))
    unfinished.chmod(0o644)
    unfinished.replace(path)


async def _collect_answers(
    folder: Path, processes: Iterable[ProbedProcess], request: str, deadline: float
) -> dict[ProbedProcess, Recording | str]:
    """Wait for all answers until the deadline, and keep the request alive meanwhile; a text says what is wrong."""
    waited_for = {
        each: f"{each.pid}-{int(each.started_at_seconds)}.record.json" for each in processes
    }
    found: dict[ProbedProcess, Recording | str] = {}
    touched = 0.0
    while len(found) < len(waited_for) and time.time() < deadline:
        if time.time() - touched >= TOUCH_SECONDS:
            os.utime(folder / REQUEST, follow_symlinks=False)
            touched = time.time()
        for process, name in waited_for.items():
            written = None if process in found else read_content(folder, name, MOST_BYTES)
            if written is not None and (answer := parse_answer(written, request)) is not None:
                found[process] = answer
        await asyncio.sleep(POLL_SECONDS)
    return found


PACKAGE: Final = "vllm_headroom_probe"
ENTRY_POINTS: Final = f"[vllm.general_plugins]\nheadroom_probe = {PACKAGE}:register\n"
"""As pyproject.toml has it: what vLLM looks for in the metadata of everything on its path."""


def install(folder: Path) -> tuple[str, ...]:
    """Put the probe into the folder, in place of an older one; return the names of what is there now."""
    version = metadata.version("vllm-headroom")
    info = folder / f"{PACKAGE}-{version}.dist-info"
    made = [folder / PACKAGE, info] if folder.exists() else [folder, folder / PACKAGE, info]
    source = importlib.util.find_spec(PACKAGE)
    if source is None or source.origin is None:
        raise BadInput(f"{PACKAGE} is not in this installation of vllm-headroom")
    try:
        for old in (folder / PACKAGE, *folder.glob(f"{PACKAGE}-*.dist-info")):
            if old.exists():
                shutil.rmtree(old)
        for path in made:
            path.mkdir(parents=True)
            path.chmod(0o755)  # vLLM is another user, and the umask may be one's own
        for file in sorted(Path(source.origin).parent.glob("*.py")):
            shutil.copyfile(file, folder / PACKAGE / file.name)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vllm-headroom-probe\nVersion: {version}\n"
        )
        (info / "entry_points.txt").write_text(ENTRY_POINTS)
        for file in (*(folder / PACKAGE).iterdir(), *info.iterdir()):
            file.chmod(0o644)
    except OSError as error:
        raise BadInput(f"{error.filename or folder}: {error.strerror or error}") from error
    return PACKAGE, info.name


WORTH_A_LINE_BYTES: Final = 2**20
MOST_SHOWN: Final = 3
"""Stacks of each kind and callers of each, of the many that --json has."""


def render_recording(recorded: Mapping[str, Any]) -> Iterator[str]:
    """Yield what each process kept, by the stacks that kept most; the process with most is first."""

    def most(process: Mapping[str, Any]) -> int:
        return max(
            (stack["bytes"] for stack in (*(process["host"] or ()), *(process["gpu"] or ()))),
            default=0,
        )

    yield f"In {format_duration(recorded['seconds'])}, what each process allocated and still holds:"
    for process in sorted(recorded["processes"], key=most, reverse=True):
        yield ""
        yield from _format_process(process)
    if recorded.get("no_native") is not None:
        yield from ("", f"No native stacks: {recorded['no_native']}")


def _format_process(process: Mapping[str, Any]) -> Iterator[str]:
    name, problem = f"{process['role']} (pid {process['pid']})", process["problem"]
    if problem is not None:
        yield f"{name}: {problem if problem == NO_ANSWER else f'an answer that cannot be used: {problem}'}"
        return
    pause, cpu, memory = (
        process["cost"][part] for part in ("pause_seconds", "cpu_seconds", "memory_bytes")
    )
    cost = (
        None if pause is None else f"{pause:.3f} s of pause",
        None if cpu is None else f"{cpu:.3f} s of CPU",
        None if memory is None else f"{format_size(memory)} of host memory",
    )
    yield f"{name}, which cost {', '.join(filter(None, cost)) or 'an unknown amount'}:"
    if process["note"] is not None:
        yield f"  {process['note']}"
    for kind, stacks in (("host", process["host"]), ("GPU", process["gpu"])):
        for stack in stacks[:MOST_SHOWN]:
            line, *callers = stack["stack"] or ("nobody knows where",)
            yield f"  {format_size(stack['bytes']):>10} {kind} memory, {stack['count']} allocations  {line}"
            yield from (f"{'':>13}called from {caller}" for caller in callers[:MOST_SHOWN])
    if not process["host"] and not process["gpu"]:
        yield "  nothing"
    yield from _format_native(process)


def _format_native(process: Mapping[str, Any]) -> Iterator[str]:
    for kind, size in list((process.get("mappings") or {}).items())[:MOST_SHOWN]:
        if size >= WORTH_A_LINE_BYTES:
            yield f"  {format_size(size):>10} more resident in {kind}, by the kernel's account of its mappings"
    for stack in (process.get("native") or ())[:MOST_SHOWN]:
        line, *callers = stack["stack"]
        yield f"  {stack['faults']:>10,} first uses of a page  {line}"
        yield from (f"{'':>13}called from {caller}" for caller in callers[:MOST_SHOWN])


INSTALL, RECORD = "install", "record"
LONGEST_SECONDS: Final = 3600
"""As the probe has it: no recording is longer."""


class ProbeSettings(Settings):
    """The daemon's settings, in whose environment this is run; its options are those that it uses."""

    no_options: ClassVar = frozenset(Settings.model_fields) - {"probe_dir"}


FOLDER: Final = Value(read=FILE.read, accepts="the path of a folder")
TIME: Final = Value(
    read=bounded(DURATION.read, 0, LONGEST_SECONDS),
    accepts="a duration above 0, at most an hour, such as 90s or 10m",
)


def _add_options(parser: Parser) -> None:
    parser.add_argument(
        "action",
        metavar="ACTION",
        nargs="?",
        type=choice([INSTALL, RECORD]),
        help="install or record",
    )
    parser.add_argument(
        "folder", metavar="FOLDER", nargs="?", type=FOLDER, help="where install puts the probe"
    )
    parser.add_argument(
        "--for",
        metavar="DURATION",
        dest="seconds",
        type=TIME,
        help="how long to record, such as 10m",
    )
    only = "record host or gpu memory alone; without it both"
    parser.add_argument("--only", metavar="KIND", type=choice(list(KINDS)), help=only)
    parser.add_settings(ProbeSettings)


async def _run(given: Namespace) -> Report:
    if (
        given.action == INSTALL
        and given.folder is not None
        and given.seconds is None
        and given.only is None
    ):
        folder, installed = given.folder, install(given.folder)
        headline = f"{folder} has {' and '.join(installed)}."
        lines = (
            f"{headline} vLLM loads the probe with",
            f"  PYTHONPATH={folder.absolute()}",
            "  HEADROOM_PROBE_DIR=FOLDER  # in memory, writable by vLLM and by the sidecar, which has the same setting",
        )
        data = {"folder": str(folder), "installed": list(installed)}
        return Report(verdict=Conclusion.GOOD, headline=headline, data=data, lines=lines)
    if given.action == RECORD and given.folder is None and given.seconds is not None:
        if given.settings.probe_dir is None:
            raise BadOptions(
                "HEADROOM_PROBE_DIR: needed to record, accepts the path of a directory"
            )
        kinds = KINDS if given.only is None else (given.only,)
        return report_recorded(
            await record(given.settings.probe_dir, given.seconds, write_note, kinds)
        )
    raise BadOptions("needs one of: install FOLDER, record --for DURATION")


def report_recorded(found: Mapping[str, Any]) -> Report:
    """Return the report on a recording; it does not judge, so its exit status is 0."""
    findings = [
        Finding(f"{each['role']} (pid {each['pid']})", Conclusion.CANNOT_TELL, each["problem"])
        for each in found["processes"]
        if each["problem"] is not None
    ]
    answered = len(found["processes"]) - len(findings)
    return Report(
        verdict=find_worst(each.verdict for each in findings),
        headline=f"{answered} of {len(found['processes'])} processes recorded what they allocated and still hold.",
        findings=findings,
        data=found,
        lines=render_recording(found),
        exit_status=0,
    )


COMMAND: Final[Command] = Command(
    usage="%(prog)s install [--json] FOLDER\n       %(prog)s record --for DURATION [--only KIND] [OPTION VALUE]...",
    description="""\
install puts the probe into a folder where any vLLM from 0.9 on finds it, its
image unchanged. It reports to the sidecar what only vLLM's processes know about
their memory, through files in HEADROOM_PROBE_DIR, which both can use.

record asks the probes of a running vLLM who allocates, for a time, what is
kept: host memory by tracemalloc, native code too by perf where it is installed,
GPU memory by torch's memory history. It slows vLLM meanwhile, host memory up to
tenfold, and is never done unasked. For a leak of GPU memory use --only gpu. See
docs/probe.md.
""",
    epilog="""\
It ends with status 0, and with 2 when the folder cannot be written or no probe
is there to record.

Example:
  vllm-headroom probe install /opt/headroom-probe
  kubectl exec POD -c headroom -- vllm-headroom probe record --for 10m
""",
    options=_add_options,
    run=_run,
)
