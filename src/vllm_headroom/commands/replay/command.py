"""The command `replay`."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Iterator
from typing import Final

from vllm_headroom.commands.cli import Command
from vllm_headroom.commands.replay.answer import document
from vllm_headroom.commands.replay.curves import Curves
from vllm_headroom.commands.replay.options import DESCRIPTION, EXAMPLES, options
from vllm_headroom.commands.replay.text import verdict
from vllm_headroom.config.options import BadOptions
from vllm_headroom.model import Snapshot
from vllm_headroom.trace.parse import snapshot_of
from vllm_headroom.trace.read import recorded, usable
from vllm_headroom.trace.replay import Watch

LEAK_FOUND: Final = 1
NARROWEST, WIDEST = 60, 160
NO_TERMINAL: Final = "No picture: pip install 'vllm-headroom[replay]' draws memory and load here."
ONE_SOURCE: Final = "needs a TRACE or --from-prometheus, and not both"


class Replayed:
    """What the detector says of a past, and its curves where they are to be drawn."""

    def __init__(self, given: Namespace) -> None:
        self.watch, self.curves = Watch(), Curves()
        self.fails = given.fail_on_leak
        for snapshot in _past(given):
            self.watch.step(snapshot)
            if not given.json:
                self.curves.step(snapshot)


def _run(given: Namespace) -> Replayed:
    if (given.trace is None) == (given.from_prometheus is None):
        raise BadOptions(ONE_SOURCE)
    return Replayed(given)


def _past(given: Namespace) -> Iterator[Snapshot]:
    """Yield the snapshots; raises BadInput at what cannot be read."""
    if given.from_prometheus is not None:
        from vllm_headroom.commands.replay.prometheus.records import records_from  # noqa: PLC0415 - a trace needs no HTTP client

        yield from usable(map(snapshot_of, records_from(given)))
    else:
        yield from recorded(given.trace)


def _text(replayed: Replayed) -> Iterator[str]:
    yield from verdict(replayed.watch)
    try:
        from vllm_headroom.commands.replay.terminal import drawing  # noqa: PLC0415 - an optional extra
    except ModuleNotFoundError:
        yield from ("", NO_TERMINAL)
        return
    columns = min(max(NARROWEST, shutil.get_terminal_size().columns), WIDEST)
    for chart in drawing(replayed.watch, replayed.curves, columns=columns):
        yield from ("", *chart)


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
