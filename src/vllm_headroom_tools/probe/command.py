"""The command `probe`: puts the probe where vLLM finds it, or has it record who allocates."""

from argparse import Namespace
from pathlib import Path
from typing import ClassVar, Final

from vllm_headroom.config import Settings
from vllm_headroom_tools.cli import Command, write_note
from vllm_headroom_tools.conclusion import Conclusion, Report
from vllm_headroom_tools.options import DURATION, FILE, BadOptions, Parser, Value, bounded, choice
from vllm_headroom_tools.probe.install import install
from vllm_headroom_tools.probe.record import KINDS, record
from vllm_headroom_tools.probe.report import report_recorded

INSTALL: Final = "install"
RECORD: Final = "record"

MAX_RECORD_SECONDS: Final = 3600
"""The longest recording: the probe itself stops after this time."""


class ProbeSettings(Settings):
    """The daemon's settings, since the command runs in the daemon's environment.

    Only the settings that this command uses are options of it.
    """

    no_options: ClassVar = frozenset(Settings.model_fields) - {"probe_dir"}


PROBE_FOLDER: Final = Value(read=FILE.read, accepts="the path of a folder")
RECORD_DURATION: Final = Value(
    read=bounded(DURATION.read, 0, MAX_RECORD_SECONDS),
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
        "folder",
        metavar="FOLDER",
        nargs="?",
        type=PROBE_FOLDER,
        help="where install puts the probe",
    )
    parser.add_argument(
        "--for",
        metavar="DURATION",
        dest="seconds",
        type=RECORD_DURATION,
        help="how long to record, such as 10m",
    )
    parser.add_argument(
        "--only",
        metavar="KIND",
        type=choice(list(KINDS)),
        help="record host or gpu memory alone; without it both",
    )
    parser.add_settings(ProbeSettings)


async def _run(arguments: Namespace) -> Report:
    """Install or record and return the report; raise BadOptions for options that do not fit."""
    folder = arguments.folder
    seconds = arguments.seconds
    if arguments.action == INSTALL and folder is not None:
        has_record_options = seconds is not None or arguments.only is not None
        if not has_record_options:
            return _report_installed(folder, install(folder))
    if arguments.action == RECORD and folder is None and seconds is not None:
        probe_dir = arguments.settings.probe_dir
        if probe_dir is None:
            raise BadOptions(
                "HEADROOM_PROBE_DIR: needed to record, accepts the path of a directory"
            )
        kinds = KINDS if arguments.only is None else (arguments.only,)
        return report_recorded(await record(probe_dir, seconds, write_note, kinds))
    raise BadOptions("needs one of: install FOLDER, record --for DURATION")


def _report_installed(folder: Path, names: tuple[str, ...]) -> Report:
    environment = (
        "HEADROOM_PROBE_DIR=FOLDER  # in memory, writable by vLLM and by the sidecar, which has the"
        " same setting"
    )
    headline = f"{folder} has {' and '.join(names)}."
    return Report(
        verdict=Conclusion.GOOD,
        headline=headline,
        data={"folder": str(folder), "installed": list(names)},
        lines=(
            f"{headline} vLLM loads the probe with",
            f"  PYTHONPATH={folder.absolute()}",
            f"  {environment}",
        ),
    )


COMMAND: Final[Command] = Command(
    usage="%(prog)s install [--json] FOLDER\n"
    "       %(prog)s record --for DURATION [--only KIND] [OPTION VALUE]...",
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
