"""A recorded trace, from a file or standard input, as snapshots."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from os import fstat
from pathlib import Path
from typing import BinaryIO, Final

from vllm_headroom.model import Snapshot
from vllm_headroom.trace.errors import BadInput
from vllm_headroom.trace.parse import snapshots
from vllm_headroom.units import duration, instant

STDIN: Final = "standard input"
CLOCKS_SECONDS: Final = 300.0
"""Clocks that are set right move by less."""

BACK: Final = "a clock was set back, or files were put together in a wrong order: FILE.1 comes before FILE"
LONGEST_LINE: Final = 2**20
"""Bytes of a line; what has none is no trace, and need not be held in memory to find that out."""


Watched = Callable[[Iterator[bytes], int | None], Iterator[bytes]]
"""Sees the lines of a trace go by, told how many bytes there are; None of what has no size."""


def recorded(trace: str, watched: Watched = lambda lines, _: lines) -> Iterator[Snapshot]:
    """Yield the snapshots of a file, or of standard input for "-", as `snapshots` does."""
    if trace == "-":
        yield from _noted(snapshots(watched(_lines(sys.stdin.buffer), None), STDIN), STDIN)
        return
    try:
        with Path(trace).open("rb") as stream:
            yield from _noted(snapshots(watched(_lines(stream), fstat(stream.fileno()).st_size), trace), trace)
    except OSError as error:
        raise BadInput(f"{trace}: cannot be read: {error.strerror}") from error


def _noted(seen: Iterator[Snapshot], name: str) -> Iterator[Snapshot]:
    """Yield the snapshots; where the time goes back for the first time there is a note on standard error."""
    newest, is_noted = 0.0, False
    for snapshot in seen:
        back = newest - snapshot.time_seconds
        if back > CLOCKS_SECONDS and not is_noted:
            is_noted = True
            with suppress(OSError):  # a note is no reason to end
                sys.stderr.write(
                    f"{name}: at {instant(snapshot.time_seconds)} the time goes back by {duration(back)}: {BACK}\n"
                )
        newest = max(newest, snapshot.time_seconds)
        yield snapshot


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    return iter(partial(stream.readline, LONGEST_LINE), b"")
