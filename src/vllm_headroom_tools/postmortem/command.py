"""The command `postmortem`: its options, and the selection of the file to read."""

import os
from argparse import Namespace
from pathlib import Path
from typing import Final

from vllm_headroom.daemon.pod import read_engine_pod
from vllm_headroom.trace.flight import FLIGHT, INCIDENTS, list_incidents
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.cli import Command, save
from vllm_headroom_tools.conclusion import Report
from vllm_headroom_tools.engine_choice import ENGINE_HELP, ENGINE_METAVAR
from vllm_headroom_tools.engine_folders import find_engine_folder
from vllm_headroom_tools.engine_log import read_engine_log
from vllm_headroom_tools.options import (
    FILE,
    LOG,
    BadOptions,
    Parser,
    Value,
    add_reported_bytes,
    read_reported_bytes,
)
from vllm_headroom_tools.postmortem.page import render_postmortem
from vllm_headroom_tools.postmortem.report import build_report, read_postmortem

STATE_DIR: Final = "HEADROOM_STATE_DIR"


def _add_options(parser: Parser) -> None:
    """Declare the options of `postmortem`."""
    parser.add_argument(
        "place",
        metavar="FILE",
        nargs="?",
        type=Value(read=FILE.read, accepts="the path of a file or a folder"),
        help="an incident, a trace, or a folder",
    )
    parser.add_argument("--engine", metavar=ENGINE_METAVAR, help=ENGINE_HELP)
    parser.add_argument(
        "--log",
        metavar="FILE",
        type=LOG,
        help="the engine's own log of that time, - for standard input",
    )
    add_reported_bytes(parser)
    parser.add_argument(
        "--html", metavar="FILE", type=FILE, help="write the page, with its curves, into one file"
    )


def find_trace(place: Path) -> Path:
    """Return the trace to read.

    If `place` is a file, that file is the trace. If `place` is a folder, the trace is the folder's
    newest incident. Raises BadInput if the folder cannot be read or contains no incident.
    """
    if not place.is_dir():
        return place
    try:
        # The operator may name either the state folder or its incidents folder.
        incidents = list_incidents(place / INCIDENTS) or list_incidents(place)
    except OSError as error:
        raise BadInput(f"{place}: cannot be read: {error.strerror}") from error
    if incidents:
        return incidents[-1]
    record = place / FLIGHT
    hint = f"; {record} is the newest record" if record.exists() else ""
    raise BadInput(
        f"{place}: has no incident, which the daemon saves when the engine exits or stalls{hint}"
    )


def _run(options: Namespace) -> Report:
    """Return the report; raise BadOptions if neither an argument nor a variable names the file."""
    place = options.place or os.environ.get(STATE_DIR)
    if not place:
        hint = "" if options.log is None else "; vllm-headroom advise reads a log without a record"
        raise BadOptions(f"needs a FILE or a FOLDER, or {STATE_DIR} in the environment{hint}")
    # A file that the operator names may be from another pod.
    pod = read_engine_pod() if options.place is None else None
    log = None if options.log is None else read_engine_log(options.log)
    # The environment variable describes this pod's engine. The variable is ignored if the operator
    # names a file.
    reported_bytes = options.reported_bytes
    if reported_bytes is None and options.place is None:
        reported_bytes = read_reported_bytes(os.environ)
    folder = find_engine_folder(Path(place), options.engine)
    postmortem = read_postmortem(find_trace(folder), pod, log, reported_bytes=reported_bytes)
    if options.html is not None:
        save(options.html, render_postmortem(postmortem), "--html ", (place,))
    return build_report(postmortem)


COMMAND: Final[Command] = Command(
    usage="%(prog)s [OPTION]... [FILE or FOLDER]",
    description="""\
Shows on one page what happened before the engine exited, why, and how sure that
is: out of GPU memory by a leak, by a burst, by a neighbour, or over its budget
from the start; killed by the kernel; a crash with GPU memory left; a start that
never fitted; a hang; an exit while idle.

FILE is an incident that the daemon saved, or any trace, whose last exit counts;
FOLDER means its newest incident. Without either, it uses HEADROOM_STATE_DIR.
With the engine's own log, what was only likely becomes sure or is contradicted.
""",
    epilog="""\
The exit status is 0, or 2 if it cannot use its input.

Example:
  vllm-headroom postmortem
  vllm-headroom postmortem incidents/2026-01-31T08-00-00Z.jsonl --html why.html
  kubectl logs --previous vllm-0 | vllm-headroom postmortem --log -
""",
    options=_add_options,
    run=_run,
)
