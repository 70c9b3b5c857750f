"""Where a replica stands among those of its group, by its name alone: nobody is asked."""

from __future__ import annotations

import re
from typing import Final
from zlib import crc32

GROUPS: Final = 2
"""In turn, half of the replicas stays open whatever happens to all: with more groups one of few had no replica."""

GOLDEN: Final = (5**0.5 - 1) / 2
"""Multiples of it, less what is whole, fill the stretch from 0 to 1 evenly, however many there are."""

FIRST_PART: Final = 0.4
HALF: Final = 0.5
"""The moments are spread over two fifths of a turn; the last of them is a tenth long, 90 s."""

_ORDINAL: Final = re.compile(r"-(\d{1,4})$")
"""What a StatefulSet appends: replicas with neighbouring numbers are never in one group."""


def place(name: str) -> int:
    """Return a number that differs between the replicas of a StatefulSet, and is spread evenly among others."""
    ordinal = _ORDINAL.search(name)
    return int(ordinal[1]) if ordinal else crc32(name.encode())


def share(name: str) -> float:
    """Return a number from 0 to 1; those of neighbours in a StatefulSet are far apart."""
    return place(name) * GOLDEN % 1.0


def has_the_watch(name: str, time_seconds: float, turn_seconds: float) -> bool:
    """Return whether it is this replica's turn to stay open; all replicas' clocks tell the same turn."""
    return place(name) % GROUPS == int(time_seconds // turn_seconds) % GROUPS


def may_leave(name: str, time_seconds: float, turn_seconds: float) -> bool:
    """Return whether it may be gone for minutes: in the first half of others' turn to stay, from its own moment on."""
    passed = time_seconds % turn_seconds / turn_seconds
    return not has_the_watch(name, time_seconds, turn_seconds) and FIRST_PART * share(name) <= passed < HALF
