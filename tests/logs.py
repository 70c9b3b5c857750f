"""What the code under test logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Events(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        level, fields = record.levelname.lower(), getattr(record, "fields", {})
        self.events.append({"event": record.getMessage(), "log_level": level, **fields})


@contextmanager
def capture_logs() -> Iterator[list[dict[str, Any]]]:
    """Yield the list of our own events at any level, each with its fields."""
    ours, handler = logging.getLogger("vllm_headroom"), _Events()
    level = ours.level
    ours.addHandler(handler)
    ours.setLevel(logging.DEBUG)
    try:
        yield handler.events
    finally:
        ours.removeHandler(handler)
        ours.setLevel(level)
