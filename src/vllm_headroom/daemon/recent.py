"""The memory in use on each GPU over the last ten minutes, second by second."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

MOST_LOOKS: Final = 600
LEAST_SECONDS: Final = 0.9
"""A look a second at the most, with room for one that comes early. With eight GPUs it all takes 0.5 MB."""

MOST_GPUS: Final = 16
"""What one engine has on one machine: so many are 260 kB in the header of an incident."""


class Recent:
    """Keeps the newest looks; times are in seconds since the epoch."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, Mapping[str, int]]] = deque(maxlen=MOST_LOOKS)

    def add(self, seconds: float, used_bytes: Mapping[str, int]) -> None:
        """Take a look at GPUs, by UUID."""
        if used_bytes and (not self._looks or abs(seconds - self._looks[-1][0]) >= LEAST_SECONDS):
            self._looks.append((round(seconds, 1), used_bytes))

    def of(self, uuids: Iterable[str]) -> dict[str, list[tuple[float, int]]]:
        """Return the looks at these GPUs, as time and memory in use."""
        return {
            uuid: [(seconds, seen[uuid]) for seconds, seen in self._looks if uuid in seen]
            for uuid in sorted(uuids)[:MOST_GPUS]
        }
