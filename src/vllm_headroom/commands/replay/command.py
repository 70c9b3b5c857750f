"""The command `replay`: its options, and what it does with them."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Iterator
from typing import Final

from vllm_headroom.commands.cli import Command, save
from vllm_headroom.commands.progress import reading
from vllm_headroom.commands.replay.picture import charts, picture
from vllm_headroom.commands.replay.prometheus.text import MATCHER, STEP, TIME
from vllm_headroom.commands.replay.report import document, verdict
from vllm_headroom.config.kinds import FILE, TRACE, url
from vllm_headroom.config.options import BadOptions, Parser
from vllm_headroom.model import Snapshot
from vllm_headroom.trace.curves import Curves
from vllm_headroom.trace.parse import recorded, snapshot_of
from vllm_headroom.trace.replay import Watch

DESCRIPTION: Final = """\
Feeds a recorded past through the daemon's leak detector: would it have caught
our outage?

TRACE is HEADROOM_TRACE_FILE of the daemon, flight.jsonl of its state directory
or - for standard input.
"""

EXAMPLES: Final = """\
It ends with status 0, with 1 when a leak was found and --fail-on-leak was
given, and with 2 when the past cannot be read.

Example:
  vllm-headroom replay trace.jsonl
  cat trace.jsonl.1 trace.jsonl | vllm-headroom replay - --json
"""

HISTORY: Final = """\
Reads this exporter's series, or DCGM's or nvidia_gpu_exporter's together with
vLLM's own. A history is as coarse as the interval of its scrapes, and what
happened between two of them is not in it."""


def options(parser: Parser) -> None:
    """Add the options to the parser."""
    parser.add_argument("trace", metavar="TRACE", nargs="?", type=TRACE, help="the trace, - for standard input")
    parser.add_argument("--fail-on-leak", action="store_true", help="end with status 1 when there was an alarm")
    parser.add_argument("--svg", metavar="FILE", type=FILE, help="draw memory and load into a file")
    add = parser.add_argument_group("history", HISTORY).add_argument
    add("--from-prometheus", metavar="URL", type=url("http://prometheus:9090"), help="Prometheus")
    add("--start", metavar="TIME", type=TIME, help="2026-01-31T08:00:00Z, seconds since the epoch, or -24h")
    add("--end", metavar="TIME", type=TIME, default="now", help="the same, or now, which is the default")
    step = "between samples: 15s, or the scrape interval where it is longer"
    add("--step", metavar="TIME", type=STEP, default="15s", help=step)
    for option, whose in (("--match", "all"), ("--match-gpu", "the GPUs'"), ("--match-engine", "the engine's")):
        text = f"choose among {whose} series; may be given again"
        add(option, metavar='LABEL="VALUE"', type=MATCHER, default=[], help=text)
    add("--bearer-token-file", metavar="FILE", type=FILE, help="a token for Prometheus")
    add("--ca-file", metavar="FILE", type=FILE, help="the authority behind its certificate, PEM")


LEAK_FOUND: Final = 1
NARROWEST, WIDEST = 20, 160
ONE_SOURCE: Final = "needs a TRACE or --from-prometheus, and not both"


class Replayed:
    """What the detector says of a past, and its curves where they are to be drawn."""

    def __init__(self, given: Namespace) -> None:
        self.watch, self.curves = Watch(), Curves()
        self.fails = given.fail_on_leak
        for snapshot in _past(given):
            self.watch.step(snapshot)
            if given.svg or not given.json:
                self.curves.step(snapshot)
        if given.svg:
            save(given.svg, picture(self.watch, self.curves), "--svg ")


def _run(given: Namespace) -> Replayed:
    if (given.trace is None) == (given.from_prometheus is None):
        raise BadOptions(ONE_SOURCE)
    return Replayed(given)


def _past(given: Namespace) -> Iterator[Snapshot]:
    """Yield the snapshots; raises BadInput at what cannot be read."""
    if given.from_prometheus is not None:
        from vllm_headroom.commands.replay.prometheus.records import records_from  # noqa: PLC0415 - a trace needs no HTTP client

        yield from map(snapshot_of, records_from(given))
    else:
        yield from recorded(given.trace, reading)


def _text(replayed: Replayed) -> Iterator[str]:
    yield from verdict(replayed.watch)
    columns = min(max(NARROWEST, shutil.get_terminal_size().columns), WIDEST)
    yield from charts(replayed.watch, replayed.curves, columns=columns)


COMMAND: Final[Command[Replayed]] = Command(
    usage="%(prog)s [OPTION]... TRACE\n       %(prog)s [OPTION]... --from-prometheus URL --start TIME",
    description=DESCRIPTION,
    epilog=EXAMPLES,
    options=options,
    run=_run,
    text=_text,
    document=lambda replayed: document(replayed.watch),
    status=lambda replayed: LEAK_FOUND if replayed.fails and replayed.watch.leaked else 0,
)
