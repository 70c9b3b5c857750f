"""The command `replay`: its options, its exit status and who draws what."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from vllm_headroom.commands.cli import BAD_INPUT, Parser, say
from vllm_headroom.commands.replay.answer import found
from vllm_headroom.commands.replay.curves import Curves
from vllm_headroom.commands.replay.text import verdict
from vllm_headroom.model import Snapshot
from vllm_headroom.trace.errors import BadInput
from vllm_headroom.trace.parse import snapshot_of
from vllm_headroom.trace.read import recorded, usable
from vllm_headroom.trace.replay import Watch

LEAK_FOUND: Final = 1
NARROWEST, WIDEST = 60, 160
NO_TERMINAL: Final = "No picture: pip install 'vllm-headroom[replay]' draws memory and load here."
NO_PNG: Final = "--png needs matplotlib: pip install 'vllm-headroom[png]'"

DESCRIPTION: Final = """\
Feeds a recorded past through the daemon's leak detector: would it have caught
our outage?

TRACE is a file that HEADROOM_TRACE_FILE let the daemon record, or - for
standard input.
"""

EXAMPLES: Final = """\
It ends with status 0, with 1 when a leak was found and --fail-on-leak was
given, and with 2 when the past cannot be read.

Example:
  vllm-headroom replay trace.jsonl
  cat trace.jsonl.1 trace.jsonl | vllm-headroom replay - --json
"""


def start(words: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = _parser(words)
    given = parser.parse_args(words)
    if (given.trace is None) == (given.from_prometheus is None):
        parser.error("needs a TRACE or --from-prometheus, and not both")
    try:
        return _replay(given)
    except BadInput as error:
        sys.stderr.write(f"{error}\n")
        return BAD_INPUT


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = Parser(
        prog="vllm-headroom replay",
        usage="%(prog)s [OPTION]... TRACE\n       %(prog)s [OPTION]... --from-prometheus URL --start TIME",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(from_prometheus=None)
    parser.add_argument("trace", metavar="TRACE", nargs="?", help="the trace, - for standard input")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of words and a picture")
    parser.add_argument("--fail-on-leak", action="store_true", help="end with status 1 when there was an alarm")
    parser.add_argument("--png", metavar="FILE", type=Path, help="draw memory and load into this file")
    if {word.partition("=")[0] for word in words} & {"-h", "--help", "--from-prometheus"}:
        from vllm_headroom.commands.replay.prometheus.records import add_options  # noqa: PLC0415 - a trace needs no HTTP client

        add_options(parser)
    return parser


def _replay(given: argparse.Namespace) -> int:
    save = _saver() if given.png else None
    watch, curves = Watch(), Curves()
    for snapshot in _past(given):
        watch.step(snapshot)
        if save or not given.json:
            curves.step(snapshot)
    if save:
        try:
            save(watch, curves, given.png)
        except OSError as error:
            raise BadInput(f"{given.png}: cannot be written: {error.strerror}") from error
    if given.json:
        say(json.dumps(found(watch), allow_nan=False))
    else:
        say("\n".join(verdict(watch)) + ("" if save else _drawn(watch, curves)))
    return LEAK_FOUND if given.fail_on_leak and watch.leaked else 0


def _past(given: argparse.Namespace) -> Iterator[Snapshot]:
    """Yield the snapshots; raises BadInput at what cannot be read."""
    if given.from_prometheus is not None:
        from vllm_headroom.commands.replay.prometheus.records import records_from  # noqa: PLC0415 - the same

        yield from usable(map(snapshot_of, records_from(given)))
    else:
        yield from recorded(given.trace)


def _saver() -> Callable[[Watch, Curves, Path], None]:
    try:
        from vllm_headroom.commands.replay.picture import save  # noqa: PLC0415 - an optional extra
    except ModuleNotFoundError as error:
        raise BadInput(NO_PNG) from error
    return save


def _drawn(watch: Watch, curves: Curves) -> str:
    try:
        from vllm_headroom.commands.replay.terminal import drawing  # noqa: PLC0415 - an optional extra
    except ModuleNotFoundError:
        return f"\n\n{NO_TERMINAL}"
    columns = min(max(NARROWEST, shutil.get_terminal_size().columns), WIDEST)
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return "".join(f"\n\n{chart}" for chart in drawing(watch, curves, columns=columns, colour=colour))
