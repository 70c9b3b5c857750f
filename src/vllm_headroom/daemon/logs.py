"""How log lines are written: to stderr, as logfmt or JSON, our own and those of libraries alike."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import textwrap
import threading
from collections import deque
from datetime import UTC, datetime
from queue import Full, Queue
from typing import Final

from vllm_headroom.vocabulary import CONTROLS
from vllm_headroom.worker import start_thread

OURS: Final = "vllm_headroom"
STDERR: Final = 2
MOST_WAITING: Final = 1000
"""Lines kept for a reader of stderr that is slow: a burst of a bad hour, half a megabyte."""

MOST_RECENT: Final = 40
LONGEST_RECENT: Final = 500
"""What was said around an incident, within 20 kB of memory and of its file."""

SHUTDOWN_SECONDS: Final = 0.2
"""How long the end waits for the last lines to be taken, out of the second that the whole exit may take."""


class Background(logging.Handler):
    """Writes to stderr from a thread of its own, so that a pipe that nobody reads holds up nobody.

    What finds no room among the lines that wait is dropped and counted, and the next line that is written says so.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting: Queue[logging.LogRecord] = Queue(MOST_WAITING)
        self._dropped = 0
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the line, or count it as dropped."""
        try:
            self._waiting.put_nowait(record)
        except Full:
            self._dropped += 1
        with contextlib.suppress(OSError):  # no thread can be started: the lines wait until one can
            self._thread = self._thread or start_thread(self._run, "log")

    def flush(self) -> None:
        """Wait until all lines are written, but not for long."""
        with self._waiting.all_tasks_done:
            self._waiting.all_tasks_done.wait_for(lambda: not self._waiting.unfinished_tasks, SHUTDOWN_SECONDS)

    def _run(self) -> None:
        told = 0
        while True:
            self._write(self._waiting.get())
            if (dropped := self._dropped) > told:
                message = "log lines were dropped, stderr was not read: dropped=%d"
                self._write(logging.LogRecord(OURS, logging.WARNING, "", 0, message, (dropped - told,), None))
                told = dropped
            self._waiting.task_done()

    def _write(self, record: logging.LogRecord) -> None:
        try:
            left = f"{self.format(record)}\n".encode(errors="backslashreplace")
            while left:
                left = left[os.write(STDERR, left) :]
        except Exception:  # noqa: BLE001 - nowhere is left to complain: the line is lost, the next may not be
            self._dropped += 1


class RecentLines(logging.Handler):
    """Remembers the last lines, each cut to a length, whatever becomes of them on stderr."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[str] = deque(maxlen=MOST_RECENT)
        self.setFormatter(Logfmt())

    def emit(self, record: logging.LogRecord) -> None:
        """Remember the line."""
        self._lines.append(self.format(record)[:LONGEST_RECENT])

    def lines(self) -> tuple[str, ...]:
        """Return the lines, the oldest first."""
        return tuple(self._lines)


def remember_lines() -> RecentLines:
    """Return what remembers our own lines from now on."""
    recent = RecentLines()
    logging.getLogger(OURS).addHandler(recent)
    return recent


def configure(log_format: str, log_level: str) -> None:
    """Write the lines of `log_level` and above to stderr; of libraries, warnings and above at any level.

    In logfmt a traceback follows its line as an indented block, in JSON it is the field `exception`.
    """
    level = logging.getLevelNamesMapping()[log_level.upper()]
    handler = Background()
    handler.setFormatter(Json() if log_format == "json" else Logfmt())
    logging.basicConfig(handlers=[handler], level=max(level, logging.WARNING), force=True)
    logging.getLogger(OURS).setLevel(level)


def _read_fields(record: logging.LogRecord) -> dict[str, object]:
    first = {
        "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "level": record.levelname.lower(),
        "event": record.getMessage(),
    }
    return {**first, **getattr(record, "fields", {})}


class Json(logging.Formatter):
    """A line of JSON; a traceback is its field `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        exception = {"exception": self.formatException(record.exc_info)} if record.exc_info else {}
        return json.dumps(_read_fields(record) | exception, default=repr)


class Logfmt(logging.Formatter):
    """A line of logfmt (brandur.org/logfmt); a traceback follows it as an indented block."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = " ".join(f"{name}={_render_word(value)}" for name, value in _read_fields(record).items()).translate(
            CONTROLS
        )
        if not record.exc_info:
            return line
        return f"{line}\n{textwrap.indent(self.formatException(record.exc_info), '  ')}"


def _render_word(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "" if value is None else str(value).lower()
    text = str(value)
    if not any(each in text for each in ' ="'):
        return text.replace("\n", "\\n")
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
