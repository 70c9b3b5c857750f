"""Unwrap log lines: remove what a container runtime or journald has put around the message."""

import json
import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, Final

from msgspec import Struct

LONGEST_LINE_BYTES: Final = 64 * 1024
"""The maximum number of bytes read from a line. A configuration of vLLM takes 5 to 10 kB."""

MOST_LAYERS: Final = 5
"""The maximum number of wrappers that are removed from a line. A line has three wrappers if
journald has logged Docker's JSON in a CRI line.
"""

MOST_TIME_DIGITS: Final = 18
"""The maximum number of digits of journald's time in microseconds; the current time has 16."""

MOST_STREAMS: Final = 4
"""The number of streams for which an incomplete line is kept. A container has two streams."""


class Message(Struct, frozen=True, kw_only=True):
    """One line logged by a process, without any prefixes that others added."""

    text: str
    seconds: float | None
    """When the runtime received the line, or None if the runtime wrote no time."""

    clock: str | None
    """The engine's own time in the form "MM-DD HH:MM:SS", or None if missing."""

    code_line: str | None
    """The file and line of the code that wrote the line, or None."""

    process: str
    pid: int | None
    has_prefix: bool
    """Whether the line was written by the engine's logger."""

    engine: str = "vllm"
    """The engine whose logger wrote the line, by its prefix. Without a prefix, this is vLLM."""

    is_below_error: bool = False
    """Whether the engine logged the line at level WARNING or below."""


class LineSplitter:
    """Splits a stream into lines without line ends.

    Only the beginning of a long line is kept.
    """

    def __init__(self) -> None:
        self.remainder = b""
        """The beginning of a line whose end has not arrived yet."""

    def split(self, chunk: bytes) -> list[bytes]:
        """Return the lines that end within the next chunk of the stream."""
        lines = chunk.split(b"\n")
        lines[0] = self.remainder + lines[0][: LONGEST_LINE_BYTES - len(self.remainder)]
        self.remainder = lines.pop()[:LONGEST_LINE_BYTES]
        return [line[:LONGEST_LINE_BYTES] for line in lines]


def split_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a stream, including a last line without a line end.

    Memory use is limited to one chunk and one line.
    """
    splitter = LineSplitter()
    for chunk in chunks:
        yield from splitter.split(chunk)
    if splitter.remainder:
        yield splitter.remainder


# These are prefixes that runtimes add to a line.

TIME: Final = r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d))"
"""A time with its zone, as Docker, the kubelet and journald's short-iso write it."""

CRI: Final = re.compile(rf"{TIME} (stdout|stderr) ([FP])(?::\S*)?(?: |$)")
"""A line of /var/log/containers. P marks a line that continues in the stream's next line."""

TIMESTAMP: Final = re.compile(rf"{TIME} ")
"""Output of kubectl logs --timestamps and docker logs --timestamps."""

KUBECTL_PREFIX: Final = re.compile(r"\[pod/[^\]\s]{1,300}\] ")
COMPOSE_PREFIX: Final = re.compile(r"[\w.-]{1,100} +\| ?")
MPI_PREFIX: Final = re.compile(r"\[\d+,\d+\]<std(?:out|err)>: ?")
JOURNAL: Final = re.compile(
    rf"(?:[A-Z][a-z]{{2}} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)?|\d{{10}}\.\d+|{TIME})"
    r" \S{1,255} [^\s\[\]:]{1,200}(?:\[\d+\])?: "
)
ANSI: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")

MESSAGE_FIELDS: Final = ("log", "MESSAGE", "message", "msg", "event")
"""The message's possible fields in a JSON line from Docker, journald or a logger."""

EXCEPTION_FIELDS: Final = ("exc_info", "exception", "stack_trace")
TIME_FIELDS: Final = ("time", "timestamp", "@timestamp", "asctime", "ts")
LEVEL_FIELDS: Final = ("levelname", "level", "severity")
PROCESS_FIELDS: Final = ("processName", "process_name", "process")

PROCESS_NAME: Final = re.compile(
    r"[A-Za-z]{0,20}(?:Server|Core|Worker|Process|Wrapper|Actor|Engine|Coordinator|Scheduler|Client)"
    r"[A-Za-z]{0,10}(?:[_-](?:[A-Z]{2,4})?\d{1,5}){0,8}"
)
"""The name of an engine's process. Any other text in the same position is not used as a name."""

LEVELS_BELOW_ERROR: Final = frozenset({"DEBUG", "INFO", "WARNING", "WARN"})
"""The levels of messages after which an engine continues to run."""

# These are prefixes that engines add to a message.

LABEL: Final = r"\(([A-Za-z][\w.:-]{0,60})(?: rank=\d+)?(?: pid=(\d+))(?:, ip=[\w.:]+)?\) ?"
"""The name of a process and its pid; Ray adds an address."""

LEVEL: Final = (
    r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) +(?:\d{4}-)?(\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,]\d+)?"
    r" \[?([\w./<>-]{1,200}:\d{1,7})\] ?"
)
"""vLLM's prefix: "[file:line]" since 0.8, and "file:line]" before that."""

VLLM: Final = re.compile(rf"(?:{LABEL})*(?:{LEVEL})?")
LEVEL_LATER: Final = re.compile(rf"[^'\"{{}}]{{1,300}}?(?:{LABEL})?{LEVEL}")
"""A prefix after other unquoted text, such as a progress bar or an operator's prefix. Prompts are
always quoted, so a prompt cannot forge a prefix.
"""

SGLANG: Final = re.compile(
    r"\[(?:\d{4}-)(\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,]\d+)?((?: [A-Z_]{2,8}\d+)*)\] ?"
)
TENSORRT: Final = re.compile(
    r"(?:\[(\d\d)/(\d\d)/\d{4}-(\d\d:\d\d:\d\d)\] )?\[(?:TRT-LLM|TensorRT-LLM)\] ?"
    r"(?:\[RANK (\d+)\] ?)?(?:\[[A-Z]+\] ?)?(?:\[(?:RANK )?(\d+)\] ?)?"
)


class LineReader:
    """Unwraps lines one by one, and joins lines that a runtime has split."""

    def __init__(self) -> None:
        self._incomplete: dict[str, str] = {}

    def read(self, line: bytes) -> Iterator[Message]:
        """Yield the messages in a line: none, one, or several if the line wraps several."""
        text = line[:LONGEST_LINE_BYTES].decode("utf-8", "replace")
        yield from self._unwrap(text, None, None, MOST_LAYERS)

    def _unwrap(
        self, text: str, seconds: float | None, process: str | None, layers: int
    ) -> Iterator[Message]:
        """Remove the wrappers of a text one after another, and yield the messages inside."""
        if "\n" in text or "\r" in text:
            # A progress bar ends each update with a carriage return.
            for part in re.split(r"[\r\n]+", text):
                if part:
                    yield from self._unwrap(part, seconds, process, layers)
            return
        # A terminal's colour codes may be in the middle of words.
        if "\x1b" in text:
            text = ANSI.sub("", text)
        # The number of wrappers is limited. A text could be wrapped any number of times.
        if layers and text:
            unwrapped = self._remove_wrapping(text, seconds, process)
            if unwrapped is not None:
                for inner_text, inner_seconds, inner_process in unwrapped:
                    yield from self._unwrap(inner_text, inner_seconds, inner_process, layers - 1)
                return
        yield read_prefix(text, seconds, process)

    def _remove_wrapping(
        self, text: str, seconds: float | None, process: str | None
    ) -> list[tuple[str, float | None, str | None]] | None:
        """Return the texts inside a wrapper with their times, or None without a wrapper.

        The list is empty for an incomplete line, which is kept until its end arrives.
        """
        # The first character rules out most formats. Ruling them out early saves time, because a
        # day of logs has millions of lines.
        beginning = text[0]
        if beginning == "{":
            return self._read_json(text, seconds, process)
        if beginning.isdigit():
            match = CRI.match(text)
            if match is not None:
                moment, stream, tag = match.groups()
                # The runtime splits long lines. The last part has the tag F, and all earlier parts
                # have P.
                inner = self._join(stream, text[match.end() :], is_complete=tag == "F")
                return [] if inner is None else [(inner, read_time(moment), process)]
            match = JOURNAL.match(text)
            if match is not None:
                return [(text[match.end() :], read_time(match[1]) or seconds, process)]
            match = TIMESTAMP.match(text)
            if match is not None:
                return [(text[match.end() :], read_time(match[1]) or seconds, process)]
            return None
        if beginning == "[":
            match = KUBECTL_PREFIX.match(text) or MPI_PREFIX.match(text)
        else:
            match = JOURNAL.match(text) or COMPOSE_PREFIX.match(text)
        return None if match is None else [(text[match.end() :], seconds, process)]

    def _read_json(
        self, text: str, seconds: float | None, process: str | None
    ) -> list[tuple[str, float | None, str | None]] | None:
        """Return the texts in a JSON line, or None if it is not JSON."""
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(document, dict):
            return None
        message = _find_text(document, MESSAGE_FIELDS)
        if message is None:
            return None
        moment = _find_text(document, TIME_FIELDS)
        if moment is not None:
            seconds = read_time(moment) or seconds
        # For journalctl --output=json, this time is more reliable than the one in the message.
        if "__REALTIME_TIMESTAMP" in document:
            seconds = _read_microseconds(document["__REALTIME_TIMESTAMP"]) or seconds
        name = _find_text(document, PROCESS_FIELDS)
        if name is not None and PROCESS_NAME.fullmatch(name):
            process = name
        # In Docker's JSON, a line that was split does not end in a line break.
        if "stream" in document and "log" in document:
            joined = self._join(
                str(document["stream"]), message, is_complete=message.endswith("\n")
            )
            return [] if joined is None else [(joined, seconds, process)]
        texts = [message]
        exception = _find_text(document, EXCEPTION_FIELDS)
        level = _find_text(document, LEVEL_FIELDS) or ""
        # An exception logged as a warning was caught.
        if exception is not None and level.upper() not in LEVELS_BELOW_ERROR:
            texts.append(exception)
        return [(inner, seconds, process) for inner in texts]

    def _join(self, stream: str, text: str, *, is_complete: bool) -> str | None:
        """Return a line joined with its earlier parts, or None while the line is incomplete."""
        text = (self._incomplete.pop(stream, "") + text)[:LONGEST_LINE_BYTES]
        if is_complete:
            return text
        if len(self._incomplete) < MOST_STREAMS:
            self._incomplete[stream] = text
        return None


def read_prefix(text: str, seconds: float | None, process: str | None) -> Message:
    """Return the message that follows the engine's own prefix."""
    clock = None
    code_line = None
    name = process or ""
    pid = None
    has_prefix = False
    is_below_error = False
    engine = "vllm"
    match = VLLM.match(text)
    # The prefix may follow a progress bar, or an operator's own prefix.
    if match is not None and match.lastindex is None and ".py:" in text:
        match = LEVEL_LATER.match(text)
    if match is not None and match.lastindex is not None:
        if match[1] is not None and PROCESS_NAME.fullmatch(match[1]):
            name = match[1]
        pid = None if match[2] is None else int(match[2][:10])
        is_below_error = match[3] in LEVELS_BELOW_ERROR
        clock = match[4]
        code_line = match[5]
        has_prefix = clock is not None
    elif text.startswith("["):
        match = SGLANG.match(text)
        if match is not None:
            engine = "sglang"
            clock = match[1]
            name = match[2].strip()
            has_prefix = True
        else:
            match = TENSORRT.match(text)
            if match is not None:
                engine = "tensorrt_llm"
                month, day, hour, first_rank, second_rank = match.groups()
                clock = None if hour is None else f"{month}-{day} {hour}"
                name = first_rank or second_rank or ""
                has_prefix = True
    # Without a prefix, the whole line is the message.
    end = 0 if match is None else match.end()
    return Message(
        text=text[end:],
        seconds=seconds,
        clock=clock,
        code_line=code_line,
        process=name,
        pid=pid,
        has_prefix=has_prefix,
        engine=engine,
        is_below_error=is_below_error,
    )


def read_time(text: str | None) -> float | None:
    """Return a time with its zone as seconds since the epoch.

    Returns None for any other text.
    """
    if text is None:
        return None
    # Python reads six decimal digits of a second, but Docker writes nine.
    text = re.sub(r"([.,]\d{6})\d+", r"\1", text.replace(",", "."))
    try:
        moment = datetime.fromisoformat(text)
        return None if moment.tzinfo is None else moment.timestamp()
    except (ValueError, OverflowError):
        return None


def _find_text(document: dict[str, Any], names: Iterable[str]) -> str | None:
    """Return the first text in one of these fields, or None if none has text."""
    for name in names:
        value = document.get(name)
        if isinstance(value, str):
            return value
    return None


def _read_microseconds(text: object) -> float | None:
    """Return journald's time in seconds, or None for any other value."""
    if (
        isinstance(text, str)
        and text.isascii()
        and text.isdigit()
        and len(text) <= MOST_TIME_DIGITS
    ):
        return int(text) / 1e6
    return None
