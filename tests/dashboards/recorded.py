"""A recorded page of an engine that goes on: what it counts, it counts further."""

from __future__ import annotations

import re
from typing import Final

COUNTED: Final = re.compile(r"_(total|sum|count|bucket)$")
STEP: Final = 16
"""Added with every fetch: more than a thousand requests, which the daemon waits for, in an hour."""


class RecordedEngine:
    """Gives the page, and with every fetch its counters a little higher."""

    def __init__(self, page: str) -> None:
        counters = set(re.findall(r"^# TYPE (\S+) counter$", page, re.MULTILINE))
        self._lines = [(line, _counts(line, counters)) for line in page.splitlines()]
        self._fetched = 0

    async def fetch(self) -> str:
        self._fetched += 1
        return "".join(f"{self._further(line) if counts else line}\n" for line, counts in self._lines)

    async def close(self) -> None:
        pass

    def _further(self, line: str) -> str:
        series, _, value = line.rpartition(" ")
        return f"{series} {float(value) + self._fetched * STEP}"


def _counts(line: str, counters: set[str]) -> bool:
    name = re.split(r"[{ ]", line, maxsplit=1)[0]
    return not line.startswith("#") and (name in counters or COUNTED.search(name) is not None)
