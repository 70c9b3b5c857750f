"""When the gates close, by what the operator says and by where a replica stands among those of its group.

That is told by its name alone: nobody is asked.
"""

from __future__ import annotations

import re
from typing import Final
from zlib import crc32

from msgspec import Struct

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


class Rules(Struct, frozen=True, kw_only=True):
    """When the gates close; None where a gate is not configured.

    `ready_seconds` is the time to out-of-memory that must be left, `ready_most_seconds` the longest that the gate is
    closed, and a replica's turn, `live_seconds` the least time from one restart to the next, `name` the replica's.
    """

    ready_seconds: float | None
    ready_most_seconds: float
    live_seconds: float | None
    name: str

    @property
    def share(self) -> float:
        """A number from 0 to 1; those of neighbours in a StatefulSet are far apart."""
        return place(self.name) * GOLDEN % 1.0

    def has_the_watch(self, time_seconds: float) -> bool:
        """Return whether it is this replica's turn to stay open; all replicas' clocks tell the same turn."""
        return place(self.name) % GROUPS == int(time_seconds // self.ready_most_seconds) % GROUPS

    def may_leave(self, time_seconds: float) -> bool:
        """Return whether it may be gone for minutes: in the first half of others' turn, from its own moment on."""
        passed = time_seconds % self.ready_most_seconds / self.ready_most_seconds
        return not self.has_the_watch(time_seconds) and FIRST_PART * self.share <= passed < HALF
