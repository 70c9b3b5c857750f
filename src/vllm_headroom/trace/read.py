"""A recorded trace, from a file or standard input, as snapshots."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from os import fstat
from pathlib import Path
from typing import BinaryIO, Final

from vllm_headroom.model import Snapshot
from vllm_headroom.trace.errors import BadInput
from vllm_headroom.trace.parse import CutOff, snapshots

LONGEST_LINE: Final = 2**20
"""Bytes of a line; what has none is no trace, and need not be held in memory to find that out."""


Watched = Callable[[Iterator[bytes], int | None], Iterator[bytes]]
"""Sees the lines of a trace go by, told how many bytes there are; None of what has no size."""


def recorded(trace: str, watched: Watched = lambda lines, _: lines) -> Iterator[Snapshot]:
    """Yield the snapshots of a file, or of standard input for "-", as `usable` does."""
    if trace == "-":
        yield from usable(snapshots(watched(_lines(sys.stdin.buffer), None)), "standard input")
        return
    try:
        with Path(trace).open("rb") as stream:
            yield from usable(snapshots(watched(_lines(stream), fstat(stream.fileno()).st_size)), trace)
    except OSError as error:
        raise BadInput(f"{trace}: cannot be read: {error.strerror}") from error


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    return iter(partial(stream.readline, LONGEST_LINE), b"")


def usable(past: Iterable[Snapshot | CutOff | str], name: str = "the trace") -> Iterator[Snapshot]:
    """Yield the snapshots; raises BadInput with the text that stands in the place of one.

    A last line that is cut off is left out, with a note on standard error: the daemon ended while it wrote it, or is
    writing it now.
    """
    for each in past:
        if isinstance(each, str):
            raise BadInput(each)
        if isinstance(each, CutOff):
            with suppress(OSError):  # a note is no reason to end
                sys.stderr.write(f"{name}: line {each.line}, the last, is cut off and left out\n")
        else:
            yield each
