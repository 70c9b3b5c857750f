"""A recorded trace, from a file or standard input, as snapshots."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from os import fstat
from pathlib import Path
from typing import BinaryIO, Final

from vllm_headroom.model import Snapshot
from vllm_headroom.trace.errors import BadInput
from vllm_headroom.trace.parse import snapshots

LONGEST_LINE: Final = 2**20
"""Bytes of a line; what has none is no trace, and need not be held in memory to find that out."""


Watched = Callable[[Iterator[bytes], int | None], Iterator[bytes]]
"""Sees the lines of a trace go by, told how many bytes there are; None of what has no size."""


def recorded(trace: str, watched: Watched = lambda lines, _: lines) -> Iterator[Snapshot]:
    """Yield the snapshots of a file, or of standard input for "-", as `snapshots` does."""
    if trace == "-":
        yield from snapshots(watched(_lines(sys.stdin.buffer), None), "standard input")
        return
    try:
        with Path(trace).open("rb") as stream:
            yield from snapshots(watched(_lines(stream), fstat(stream.fileno()).st_size), trace)
    except OSError as error:
        raise BadInput(f"{trace}: cannot be read: {error.strerror}") from error


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    return iter(partial(stream.readline, LONGEST_LINE), b"")
