"""A recorded trace, from a file or standard input, as snapshots."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

from vllm_headroom.model import Snapshot
from vllm_headroom.trace.errors import BadInput
from vllm_headroom.trace.parse import snapshots

LONGEST_LINE: Final = 2**20
"""Bytes of a line; what has none is no trace, and need not be held in memory to find that out."""


def recorded(trace: str) -> Iterator[Snapshot]:
    """Yield the snapshots of a file, or of standard input for "-"; raises BadInput at what cannot be read."""
    if trace == "-":
        yield from usable(snapshots(_lines(sys.stdin.buffer)))
        return
    try:
        with Path(trace).open("rb") as stream:
            yield from usable(snapshots(_lines(stream)))
    except OSError as error:
        raise BadInput(f"{trace}: cannot be read: {error.strerror}") from error


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    return iter(partial(stream.readline, LONGEST_LINE), b"")


def usable(past: Iterable[Snapshot | str]) -> Iterator[Snapshot]:
    """Yield the snapshots; raises BadInput with the text that stands in the place of one."""
    for snapshot in past:
        if isinstance(snapshot, str):
            raise BadInput(snapshot)
        yield snapshot
