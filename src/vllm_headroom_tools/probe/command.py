"""The command `probe`, which installs the probe where vLLM finds it, and requests recordings."""

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
from vllm_headroom_tools.probe.snapshot import report_read, report_taken, take_snapshots
from vllm_headroom_tools.probe.snapshot_file import read_snapshot_file

INSTALL: Final = "install"
RECORD: Final = "record"
SNAPSHOT: Final = "snapshot"

MAX_RECORD_SECONDS: Final = 3600
"""The maximum length of a recording; after this time, the probe stops by itself."""


class ProbeSettings(Settings):
    """The daemon's settings, because the command runs in the daemon's environment.

    Only the settings that this command uses have options.
    """

    no_options: ClassVar = frozenset(Settings.model_fields) - {"probe_dir"}


PLACE: Final = Value(read=FILE.read, accepts="the path of a folder, or of a snapshot")
RECORD_DURATION: Final = Value(
    read=bounded(DURATION.read, 0, MAX_RECORD_SECONDS),
    accepts="a duration above 0, at most an hour, such as 90s or 10m",
)


def _add_options(parser: Parser) -> None:
    """Declare the options of `probe`."""
    parser.add_argument(
        "action",
        metavar="ACTION",
        nargs="?",
        type=choice([INSTALL, RECORD, SNAPSHOT]),
        help="install, record or snapshot",
    )
    parser.add_argument(
        "place",
        metavar="PLACE",
        nargs="?",
        type=PLACE,
        help="the folder where install puts the probe, or the snapshot to read",
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
    """Perform the action and return its report; raise BadOptions for options it does not take.

    Raises BadInput if the action cannot be performed.
    """
    place = arguments.place
    seconds = arguments.seconds
    has_record_options = seconds is not None or arguments.only is not None
    if arguments.action == INSTALL and place is not None and not has_record_options:
        return _report_installed(place, install(place))
    if arguments.action == RECORD and place is None and seconds is not None:
        probe_dir = _require_probe_dir(arguments, "to record")
        kinds = KINDS if arguments.only is None else (arguments.only,)
        return report_recorded(await record(probe_dir, seconds, write_note, kinds))
    if arguments.action == SNAPSHOT and not has_record_options:
        if place is not None:
            return report_read(place, read_snapshot_file(place))
        probe_dir = _require_probe_dir(arguments, "for a snapshot")
        return report_taken(await take_snapshots(probe_dir, write_note))
    raise BadOptions("needs one of: install FOLDER, record --for DURATION, snapshot [FILE]")


def _require_probe_dir(arguments: Namespace, purpose: str) -> Path:
    """Return the probe's folder; raise BadOptions if it is not set."""
    probe_dir: Path | None = arguments.settings.probe_dir
    if probe_dir is None:
        accepts = "accepts the path of a directory"
        raise BadOptions(f"HEADROOM_PROBE_DIR: needed {purpose}, {accepts}")
    return probe_dir


def _report_installed(folder: Path, names: tuple[str, ...]) -> Report:
    """Return the report on an installation, including the settings to add to vLLM's environment."""
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
    "       %(prog)s record --for DURATION [--only KIND] [OPTION VALUE]...\n"
    "       %(prog)s snapshot [FILE]",
    description="""\
install puts the probe into a folder where any vLLM from 0.9 on finds it, its
image unchanged. It reports to the sidecar what only vLLM's processes know about
their memory, through files in HEADROOM_PROBE_DIR, which both can use.

record asks the probes of a running vLLM who allocates, for a time, what is
kept: host memory by tracemalloc, native code too by perf where it is installed,
GPU memory by torch's memory history. It slows vLLM meanwhile, host memory up to
tenfold, and is never done unasked. For a leak of GPU memory use --only gpu. See
docs/probe.md.

snapshot has the probes write a snapshot of torch's GPU memory for memory_viz,
and says which lines of code hold most. vLLM needs HEADROOM_PROBE_SNAPSHOT, with
which torch keeps the history. With a FILE, which may be one that the probe left
at an OutOfMemoryError, it reads that one, without torch.
""",
    epilog="""\
It ends with status 0, and with 2 when the folder cannot be written, no probe is
there to ask, or the file is no snapshot.

Example:
  vllm-headroom probe install /opt/headroom-probe
  kubectl exec POD -c headroom -- vllm-headroom probe record --for 10m
  vllm-headroom probe snapshot oom-rank0-1860-1790000000.pickle
""",
    options=_add_options,
    run=_run,
)
