"""The highest memory in use within a sliding window."""

from __future__ import annotations

from collections import deque
from typing import Final

WINDOW_SECONDS: Final = 60.0
"""Four scrapes at Prometheus' usual 15 s: a peak between two of them is on the page for several."""


class Peak:
    """Keeps the samples that can still become the highest: each is higher than all later ones."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def add(self, now: float, used_bytes: int) -> None:
        """Take a sample; `now` must not decrease."""
        while self._samples and self._samples[-1][1] <= used_bytes:
            self._samples.pop()
        self._samples.append((now, used_bytes))

    def highest_bytes(self, now: float) -> int | None:
        """Return the highest sample of the window that ends now; None without one."""
        while self._samples and self._samples[0][0] < now - WINDOW_SECONDS:
            self._samples.popleft()
        return self._samples[0][1] if self._samples else None
