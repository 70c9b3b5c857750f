"""Write the daemon's and the libraries' log lines to stderr, as logfmt or JSON."""

import contextlib
import json
import logging
import os
import textwrap
import threading
from collections import deque
from queue import Full, Queue
from typing import Final

from vllm_headroom.units import to_datetime
from vllm_headroom.vocabulary import CONTROLS
from vllm_headroom.worker import start_thread

OURS: Final = "vllm_headroom"
"""The logger for all lines that do not come from a library."""

MOST_WAITING_LINES: Final = 1000
"""The maximum number of lines waiting for a slow reader of stderr. The waiting lines take half a
megabyte.
"""

MOST_RECENT_LINES: Final = 40
"""The number of newest lines kept for an incident's file. At MOST_RECENT_CHARACTERS each, they take
at most 20 kB.
"""

MOST_RECENT_CHARACTERS: Final = 500
"""The maximum length to which each of these lines is truncated."""

STDERR: Final = 2
"""The file descriptor of stderr."""

LOG_SHUTDOWN_SECONDS: Final = 0.2
"""How long the exit waits for the last lines to be read. The limit for the entire exit is one
second.
"""


class Background(logging.Handler):
    """Writes to stderr from a separate thread.

    An unread pipe therefore does not block the daemon. Lines that do not fit in the queue are
    dropped and counted. The next line is followed by one that reports how many were dropped.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting: Queue[logging.LogRecord] = Queue(MOST_WAITING_LINES)
        self._dropped = 0
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the line, or count it as dropped."""
        try:
            self._waiting.put_nowait(record)
        except Full:
            self._dropped += 1
        if self._thread is None:
            with contextlib.suppress(OSError):  # If no thread can be started, lines stay queued.
                self._thread = start_thread(self._run, "log")

    def flush(self) -> None:
        """Wait until all lines are written, but for at most LOG_SHUTDOWN_SECONDS."""
        with self._waiting.all_tasks_done:
            self._waiting.all_tasks_done.wait_for(
                lambda: not self._waiting.unfinished_tasks, LOG_SHUTDOWN_SECONDS
            )

    def _run(self) -> None:
        """Write queued lines forever, and report dropped ones."""
        reported_lines = 0
        while True:
            self._write(self._waiting.get())
            dropped_lines = self._dropped
            if dropped_lines > reported_lines:
                message = "log lines were dropped, stderr was not read: dropped=%d"
                # The line is built by hand. A logger would put it into the full queue.
                arguments = (dropped_lines - reported_lines,)
                self._write(
                    logging.LogRecord(OURS, logging.WARNING, "", 0, message, arguments, None)
                )
                reported_lines = dropped_lines
            self._waiting.task_done()

    def _write(self, record: logging.LogRecord) -> None:
        """Write one line to stderr and wait for its reader.

        If writing fails, the line is lost.
        """
        try:
            unwritten = f"{self.format(record)}\n".encode(errors="backslashreplace")
            while unwritten:
                written_bytes = os.write(STDERR, unwritten)
                unwritten = unwritten[written_bytes:]
        except Exception:  # noqa: BLE001 - there is nowhere to report it: the line is lost
            self._dropped += 1


class RecentLines(logging.Handler):
    """Keeps the daemon's newest lines, each truncated to a maximum length.

    If `engine_name` is set, only lines about that engine or about no engine are kept.
    """

    def __init__(self, engine_name: str = "") -> None:
        super().__init__()
        self._engine_name = engine_name
        self.lines: deque[str] = deque(maxlen=MOST_RECENT_LINES)
        """The lines, oldest first."""
        self.setFormatter(Logfmt())
        logging.getLogger(OURS).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line."""
        if getattr(record, "engine_name", "") in {"", self._engine_name}:
            self.lines.append(self.format(record)[:MOST_RECENT_CHARACTERS])

    def close(self) -> None:
        """Stop keeping lines."""
        logging.getLogger(OURS).removeHandler(self)
        super().close()


def configure(log_format: str, log_level: str) -> None:
    """Write the daemon's log lines of level `log_level` and above to stderr.

    Log lines from libraries are written only at level warning and above.

    In logfmt, a traceback follows its line as an indented block. In JSON, the traceback is the
    field `exception`.
    """
    level = logging.getLevelNamesMapping()[log_level.upper()]
    handler = Background()
    handler.setFormatter(Json() if log_format == "json" else Logfmt())
    logging.basicConfig(handlers=[handler], level=max(level, logging.WARNING), force=True)
    logging.getLogger(OURS).setLevel(level)


def _read_fields(record: logging.LogRecord) -> dict[str, object]:
    """Return the fields of a line in order: time, level, event, then the caller's fields."""
    instant = to_datetime(record.created).isoformat(timespec="microseconds")
    fields: dict[str, object] = {
        "ts": instant.replace("+00:00", "Z"),
        "level": record.levelname.lower(),
        "event": record.getMessage(),
    }
    return fields | getattr(record, "fields", {})


class Json(logging.Formatter):
    """Formats a line as JSON, with any traceback in the field `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = _read_fields(record)
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=repr)


class Logfmt(logging.Formatter):
    """Formats a line as logfmt (brandur.org/logfmt), followed by any traceback, indented."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = _read_fields(record)
        line = " ".join(f"{name}={_render_word(value)}" for name, value in fields.items())
        line = line.translate(CONTROLS)
        if not record.exc_info:
            return line
        traceback = textwrap.indent(self.formatException(record.exc_info), "  ")
        return f"{line}\n{traceback}"


def _render_word(value: object) -> str:
    """Return a value in logfmt notation, or "" for None.

    A value with special characters is quoted.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    if any(character in text for character in ' ="'):
        escaped = text.replace("\\", "\\\\").replace('"', '\\"')
        text = f'"{escaped}"'
    return text.replace("\n", "\\n")
