"""Write log lines to stderr, as logfmt or JSON, the daemon's and those of libraries."""

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
MOST_WAITING: Final = 1000
"""Lines that wait for a slow reader of stderr: half a megabyte."""

MOST_RECENT: Final = 40
LONGEST_RECENT: Final = 500
"""The lines around an incident, within 20 kB of memory and of its file."""

SHUTDOWN_SECONDS: Final = 0.2
"""How long the exit, which may take a second in all, waits for the last lines to be read."""


class Background(logging.Handler):
    """Writes to stderr from a separate thread, so that an unread pipe does not block the daemon.

    Lines beyond the queue are dropped and counted; a line with their number follows the next one that is written.
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
        with contextlib.suppress(OSError):  # no thread can be started: the lines wait
            self._thread = self._thread or start_thread(self._run, "log")

    def flush(self) -> None:
        """Wait until all lines are written, but not for long."""
        with self._waiting.all_tasks_done:
            self._waiting.all_tasks_done.wait_for(
                lambda: not self._waiting.unfinished_tasks, SHUTDOWN_SECONDS
            )

    def _run(self) -> None:
        reported = 0
        while True:
            self._write(self._waiting.get())
            if (dropped := self._dropped) > reported:
                message = "log lines were dropped, stderr was not read: dropped=%d"
                self._write(
                    logging.LogRecord(
                        OURS, logging.WARNING, "", 0, message, (dropped - reported,), None
                    )
                )
                reported = dropped
            self._waiting.task_done()

    def _write(self, record: logging.LogRecord) -> None:
        try:
            left = f"{self.format(record)}\n".encode(errors="backslashreplace")
            while left:
                left = left[os.write(2, left) :]
        except Exception:  # noqa: BLE001 - there is nowhere to report it: the line is lost
            self._dropped += 1


class RecentLines(logging.Handler):
    """Keeps the daemon's last lines from now on, the oldest first and each cut to a length."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: deque[str] = deque(maxlen=MOST_RECENT)
        self.setFormatter(Logfmt())
        logging.getLogger(OURS).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line."""
        self.lines.append(self.format(record)[:LONGEST_RECENT])


def configure(log_format: str, log_level: str) -> None:
    """Write lines of `log_level` and above to stderr, of libraries at least of level warning.

    In logfmt a traceback follows its line as an indented block, in JSON it is the field `exception`.
    """
    level = logging.getLevelNamesMapping()[log_level.upper()]
    handler = Background()
    handler.setFormatter(Json() if log_format == "json" else Logfmt())
    logging.basicConfig(handlers=[handler], level=max(level, logging.WARNING), force=True)
    logging.getLogger(OURS).setLevel(level)


def _read_fields(record: logging.LogRecord) -> dict[str, object]:
    first = {
        "ts": datetime.fromtimestamp(record.created, UTC)
        .isoformat(timespec="microseconds")
        .replace("+00:00", "Z"),
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
        words = (f"{name}={_render_word(value)}" for name, value in _read_fields(record).items())
        trace = (
            f"\n{textwrap.indent(self.formatException(record.exc_info), '  ')}"
            if record.exc_info
            else ""
        )
        return " ".join(words).translate(CONTROLS) + trace


def _render_word(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "" if value is None else str(value).lower()
    text = str(value)
    if any(each in text for each in ' ="'):
        text = '"{}"'.format(text.replace("\\", "\\\\").replace('"', '\\"'))
    return text.replace("\n", "\\n")
