"""Records of an engine's starts, read line by line from its log."""

import re
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

from vllm_headroom.model.start import (
    EngineLog,
    EngineStart,
    LogEvent,
    LogFailure,
    LogFrame,
    LogRemark,
    LogTime,
    ProcessFigures,
    Refusal,
    Scalar,
)
from vllm_headroom.parse.log.arguments import LIKE_A_SECRET, PLAIN_TEXT, read_arguments
from vllm_headroom.parse.log.lines import LineReader, Message, split_lines
from vllm_headroom.parse.log.patterns import (
    ANY_HEAD,
    FAILURE_HINT,
    FAILURES_BY_HEAD,
    HEAD_CHARACTERS,
    INVALID_OPTION,
    LINES_BY_HEAD,
    FailurePattern,
    LinePattern,
)
from vllm_headroom.units import GIB
from vllm_headroom.vocabulary import LogEventKind, LogFailureKind, LogRemarkKind, StartPhase

MOST_STARTS: Final = 64
"""The number of newest starts that are kept. More are not needed, because a crash loop repeats
itself.
"""

MOST_PROCESSES: Final = 256
"""The maximum number of processes kept per start; the largest engines have 128 GPUs."""

MOST_FAILURES: Final = 32
"""The number of earliest failures kept per start; later failures are consequences of them."""

MOST_EVENTS: Final = 64
"""The number of newest events kept per start. An engine logs its load 6 times per minute."""

MOST_FRAMES: Final = 3
"""The number of innermost frames kept per traceback."""

LARGEST_FIGURE: Final = 2.0**60
"""A figure above this (one exbibyte) cannot come from an engine."""

SURVIVING_LOADS: Final = 2
"""An engine has survived a failure if this many later load reports show generated tokens. The first
report after a crash still covers some seconds before the crash.
"""

PHASES: Final = list(StartPhase)

VERSION_LINE: Final = re.compile(r"vLLM (?:API )?server version (\S{1,60})")
BANNER_VERSION: Final = re.compile(r"[ ▀-▟]+ version +(\S{1,60})$")
BANNER_MODEL: Final = re.compile(r"[ ▀-▟]+ model +(\S{1,200})$")
ENGINE_CONFIG: Final = re.compile(
    r"Initializing an? (?:V\d )?LLM engine \(v([^)\s]{1,60})\) with config: (.*)"
)
ARGUMENTS: Final = re.compile(r"(?:non-default )?args: (?=\{|Namespace\()(.*)")
SGLANG_ARGUMENTS: Final = re.compile(r"server_args=(ServerArgs\(.*)")
TENSORRT_VERSION: Final = re.compile(r"TensorRT-LLM version: (\S{1,60})")
FRAME: Final = re.compile(r'File "([^"]{1,400})", line (\d{1,7}), in ([\w.<>]{1,100})')
ENGINE_FILE: Final = re.compile(r"(?:^|/)((?:vllm|sglang|tensorrt_llm)/[\w./-]+)$")
EXCEPTION: Final = re.compile(
    r"((?:[A-Za-z_]\w{0,60}\.){0,8})([A-Z]\w{0,60}(?:Error|Exception|Exit|Interrupt)|Exception)"
    r"(?:: ?(.*))?$"
)
TRACEBACK_AFTER: Final = "exception: Traceback (most recent call last):"
"""The beginning of a traceback from SGLang, which follows a sentence on the same line."""

REQUEST: Final = re.compile(
    r"(?:Received request|Generated response|Added request|Aborted request|Request \S+ "
    r"|INFO: +\S+ - \")"
)
"""Lines about requests are not read, because they may contain prompts."""

TORCH_SIZE: Final = r"([\d.]{1,12}) (bytes|KiB|MiB|GiB|TiB)"
SIZE_BYTES: Final = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB, "TiB": 2**40}
REFUSAL_SIZES: Final = (
    ("asked_bytes", re.compile(rf"Tried to allocate {TORCH_SIZE}")),
    (
        "total_bytes",
        re.compile(rf"total capac(?:i)?ty of {TORCH_SIZE}|{TORCH_SIZE} total capacity"),
    ),
    ("free_bytes", re.compile(rf"of which {TORCH_SIZE} is free|{TORCH_SIZE} free;")),
    ("process_bytes", re.compile(rf"this process has {TORCH_SIZE} memory in use")),
    (
        "allocated_bytes",
        re.compile(rf"Of the allocated memory {TORCH_SIZE}|{TORCH_SIZE} already allocated"),
    ),
    ("graph_bytes", re.compile(rf"with {TORCH_SIZE} allocated in private pools")),
    ("cached_bytes", re.compile(rf"{TORCH_SIZE} is reserved by PyTorch but unallocated")),
)
RESERVED: Final = re.compile(rf"{TORCH_SIZE} reserved in total by PyTorch")
OTHER_PROCESS: Final = re.compile(rf"Process \d+ has {TORCH_SIZE} memory in use")
REFUSAL_GPU: Final = re.compile(r"\bGPU (\d{1,3})\b")


class LogReader:
    """Reads a log line by line and returns each line's events.

    `start` is the newest start.
    """

    def __init__(self) -> None:
        self._lines = LineReader()
        self._builder: _StartBuilder | None = None
        self.line_count = 0
        self.start_count = 0
        self.finished: deque[EngineStart] = deque(maxlen=MOST_STARTS)
        """The records of earlier starts, with the newest last."""

    @property
    def start(self) -> EngineStart | None:
        """Return the record of the newest start, or None before an engine's first line."""
        return None if self._builder is None else self._builder.build(is_followed=False)

    def feed(self, line: bytes) -> tuple[LogEvent, ...]:
        """Read one line and return its events."""
        self.line_count += 1
        events: list[LogEvent] = []
        for message in self._lines.read(line):
            events += self._read_message(message)
        return tuple(events)

    def _read_message(self, message: Message) -> list[LogEvent]:
        """Return a message's events. Messages before the first start or on requests have none."""
        text = message.text
        if not text or REQUEST.match(text):
            return []
        begun = self._read_begin(message)
        if begun is not None:
            return begun
        if self._builder is None:
            if not (message.has_prefix or message.pid is not None or _is_failure(text)):
                return []
            self._begin(message.engine, message)
        assert self._builder is not None  # noqa: S101 - begun above
        return self._builder.read(message, self.line_count)

    def _read_begin(self, message: Message) -> list[LogEvent] | None:
        """Return the events of a line that begins or describes a start, or None."""
        text = message.text
        beginning = text.lstrip()[:1]
        # The banner is drawn with block elements, so each of its lines begins with one.
        if beginning in "▀▁▂▃▄▅▆▇█▉▊▋▌▍▎▏▐░▒▓▔▕▖▗▘▙▚▛▜▝▞▟" and beginning:
            match = BANNER_VERSION.match(text)
            if match is not None:
                return self._begin_server("vllm", match[1], message)
            match = BANNER_MODEL.match(text)
            if match is not None and self._builder is not None:
                self._builder.set_model(match[1])
            return []
        if text.startswith("vLLM "):
            match = VERSION_LINE.match(text)
            if match is not None:
                return self._begin_server("vllm", match[1], message)
        if text.startswith("Initializing "):
            match = ENGINE_CONFIG.match(text)
            if match is not None:
                return self._begin_engine(match[1], match[2], message)
        if text.startswith(("non-default args:", "args: ")):
            match = ARGUMENTS.match(text)
            if match is not None:
                builder = self._builder or self._begin("vllm", message)
                builder.add_arguments(read_arguments(match[1]))
                return [builder.note(LogEventKind.ARGUMENTS, message, self.line_count)]
        if text.startswith("server_args="):
            match = SGLANG_ARGUMENTS.match(text)
            if match is not None:
                builder = self._begin("sglang", message)
                builder.add_arguments(read_arguments(match[1]))
                return [builder.note(LogEventKind.START, message, self.line_count)]
        if text.startswith("TensorRT-LLM version:"):
            match = TENSORRT_VERSION.match(text)
            # Every rank writes this line.
            is_first = self._builder is None or self._builder.has_progressed()
            if match is not None and is_first:
                begun = self._begin("tensorrt_llm", message)
                begun.version = _clean(match[1])
                return [begun.note(LogEventKind.START, message, self.line_count)]
        return None

    def _begin_server(self, engine: str, version: str, message: Message) -> list[LogEvent]:
        """Begin a start with the first line of the server.

        If there are several API servers, each writes its own start line.
        """
        builder = self._builder
        is_another = re.match(r"ApiServer_\d", message.process) is not None
        if builder is None or (not is_another and (builder.version or builder.has_progressed())):
            builder = self._begin(engine, message)
        if builder.version is None:
            builder.version = _clean(version)
        return [builder.note(LogEventKind.START, message, self.line_count)]

    def _begin_engine(self, version: str, config: str, message: Message) -> list[LogEvent]:
        """Add an engine's configuration; begin a start if no server has done so."""
        builder = self._builder
        # A second configuration from the same process indicates another start without a banner.
        is_same_process = builder is not None and (message.process, message.pid) in builder.engines
        kind = LogEventKind.ARGUMENTS
        if builder is None or is_same_process or builder.has_ended():
            builder = self._begin("vllm", message)
            kind = LogEventKind.START
        builder.engines.add((message.process, message.pid))
        builder.version = builder.version or _clean(version)
        builder.add_config(read_arguments(config))
        return [builder.note(kind, message, self.line_count)]

    def _begin(self, engine: str, message: Message) -> "_StartBuilder":
        if self._builder is not None:
            self.finished.append(self._builder.build(is_followed=True))
        self.start_count += 1
        self._builder = _StartBuilder(engine, self.line_count, _read_time(message))
        return self._builder


def read_log(chunks: Iterable[bytes]) -> EngineLog:
    """Read a whole log, given in chunks of any size."""
    reader = LogReader()
    for line in split_lines(chunks):
        reader.feed(line)
    starts = list(reader.finished)
    if reader.start is not None:
        starts.append(reader.start)
    return EngineLog(
        starts=tuple(starts), start_count=reader.start_count, line_count=reader.line_count
    )


class _StartBuilder:
    """Collects the facts from the lines of one start."""

    def __init__(self, engine: str, line_number: int, time: LogTime) -> None:
        self.engine = engine
        self.version: str | None = None
        self.engines: set[tuple[str, int | None]] = set()
        self._model: str | None = None
        self._first_line = line_number
        self._last_line = line_number
        self._begin = time
        self._end = time
        self._arguments: dict[str, Scalar] = {}
        self._config: dict[str, Scalar] = {}
        self._names: dict[str, str] = {}
        self._pids: dict[str, int | None] = {}
        self._figures: dict[str, dict[str, Any]] = {}
        self._figure_lines: dict[str, dict[str, int]] = {}
        self._failures: list[LogFailure] = []
        self._remarks: dict[LogRemarkKind, LogRemark] = {}
        self._frames: dict[str, list[LogFrame]] = {}
        self._traceback_key = ""
        """The process that most recently began a traceback."""
        self._phase = StartPhase.BEGINNING
        self._loads_since_failure = 0
        self._is_stopped = False
        self._events: deque[LogEvent] = deque(maxlen=MOST_EVENTS)

    def has_progressed(self) -> bool:
        """Return whether the start has progressed beyond its first lines."""
        return bool(self.engines or self._figures or self._failures)

    def has_ended(self) -> bool:
        """Return whether the engine has served, stopped or failed."""
        return bool(self._failures or self._is_stopped or self._phase is StartPhase.SERVING)

    def set_model(self, model: str) -> None:
        """Set the model from the banner, unless its text may contain a secret."""
        if PLAIN_TEXT.fullmatch(model) and not LIKE_A_SECRET.search(model):
            self._model = model

    def add_arguments(self, arguments: dict[str, Scalar]) -> None:
        """Add the command-line options."""
        self._arguments |= arguments

    def add_config(self, config: dict[str, Scalar]) -> None:
        """Add an engine's configuration, but keep the values that earlier engines have set."""
        for name, value in config.items():
            self._config.setdefault(name, value)

    def note(
        self,
        kind: LogEventKind,
        message: Message,
        line_number: int,
        *,
        figures: dict[str, float] | None = None,
        failure: LogFailure | None = None,
        remark: LogRemarkKind | None = None,
    ) -> LogEvent:
        """Store an event and return it."""
        self._touch(message, line_number)
        event = LogEvent(
            kind=kind,
            line_number=line_number,
            time=_read_time(message),
            process=message.process,
            figures=figures or {},
            failure=failure,
            remark=remark,
        )
        self._events.append(event)
        return event

    def _touch(self, message: Message, line_number: int) -> None:
        self._last_line = line_number
        if message.seconds is not None or message.clock is not None:
            self._end = _read_time(message)

    def read(self, message: Message, line_number: int) -> list[LogEvent]:
        """Read a line that does not begin a start."""
        self._touch(message, line_number)
        text = message.text.lstrip()
        # Tracebacks of several processes are interleaved in one log, so frames are kept per
        # process.
        key = self._find_process(message)
        # SGLang names the process only in a traceback's first line.
        if not key and "" not in self._frames and not message.has_prefix:
            key = self._traceback_key
        if text.startswith('File "'):
            self._add_frame(key, text)
            return []
        if text.startswith("Traceback (most recent call last)") or text.endswith(TRACEBACK_AFTER):
            if key in self._frames or len(self._frames) < MOST_PROCESSES:
                self._frames[key] = []
                self._traceback_key = key
            return []
        is_option_refused = text.startswith(INVALID_OPTION)
        text = text.removeprefix(INVALID_OPTION)
        head = text[:HEAD_CHARACTERS]
        for pattern in LINES_BY_HEAD.get(head, ()):
            match = pattern.pattern.match(text)
            if match is not None:
                return self._add_figures(pattern, match, message, key, line_number)
        # A traceback's own lines are indented. The line with the exception is not indented, except
        # in pydantic's report.
        exception = EXCEPTION.match(text)
        if exception is not None:
            return self._add_exception(exception, message, key, line_number)
        # Failures without an exception come from the driver or the kernel, for example.
        failure_pattern, match = _find_failure(text, None)
        # Options are refused with many different messages. Requests may also be refused, but only
        # later.
        if match is None and is_option_refused and self._phase is StartPhase.BEGINNING:
            failure_pattern, match = _find_failure(INVALID_OPTION, None)
        if failure_pattern is None or match is None:
            return []
        return self._add_failure(failure_pattern, match, message, key, line_number, exception=None)

    def _find_process(self, message: Message) -> str:
        """Return the key of the process that wrote a line.

        The process may get its name later.
        """
        key = message.process if message.pid is None else str(message.pid)
        if key not in self._names and len(self._names) >= MOST_PROCESSES:
            return ""
        self._names[key] = message.process
        self._pids[key] = message.pid
        return key

    def _add_frame(self, key: str, text: str) -> None:
        """Add a traceback's line to the process's frames.

        Lines outside the engine's code are ignored.
        """
        match = FRAME.match(text)
        file = None if match is None else ENGINE_FILE.search(match[1])
        frames = self._frames.get(key)
        if match is None or file is None or frames is None:
            return
        frames.append(LogFrame(file[1][-200:], int(match[2]), match[3]))
        del frames[:-MOST_FRAMES]

    def _add_figures(
        self,
        pattern: LinePattern,
        match: re.Match[str],
        message: Message,
        key: str,
        line_number: int,
    ) -> list[LogEvent]:
        """Keep the figures, phase and remark of a matching line, and return its event."""
        figures = _read_figures(pattern.figures, match)
        kind = pattern.kind
        if kind is LogEventKind.LOAD:
            self._count_load(figures)
        elif kind is LogEventKind.SERVING:
            # An engine that starts to serve has survived whatever was logged before.
            self._failures.clear()
        elif kind is LogEventKind.STOP:
            # A shutdown after a failure is a consequence of the failure.
            if self._failures:
                return []
            self._is_stopped = True
        else:
            self._keep_figures(pattern, figures, key, line_number)
            if pattern.text is not None:
                self._figures.setdefault(key, {})[pattern.text] = match[match.lastindex or 0]
        if pattern.phase is not None:
            self._phase = max(self._phase, pattern.phase, key=PHASES.index)
        if pattern.remark is not None:
            self._add_remark(pattern.remark, line_number)
        event = self.note(kind, message, line_number, figures=figures, remark=pattern.remark)
        return [event]

    def _keep_figures(
        self, pattern: LinePattern, figures: dict[str, float], key: str, line_number: int
    ) -> None:
        """Keep a line's figures for its process.

        The newest figure is kept, or the smallest if `pattern` requires it.
        """
        process_figures = self._figures.setdefault(key, {})
        lines = self._figure_lines.setdefault(key, {})
        for field, value in figures.items():
            if pattern.is_least and process_figures.get(field, value) < value:
                continue
            if pattern.is_part:
                process_figures[field] = process_figures.get(field, 0.0) + value
                lines.setdefault(field, line_number)
                continue
            if process_figures.get(field) == value:
                continue  # The line that first reports a figure is kept.
            process_figures[field] = value
            lines[field] = line_number

    def _count_load(self, figures: dict[str, float]) -> None:
        """Count load reports, and discard the failures that the engine has survived."""
        if not self._failures or not figures.get("generation_tokens_per_second"):
            return
        self._loads_since_failure += 1
        if self._loads_since_failure >= SURVIVING_LOADS:
            self._failures.clear()
            self._loads_since_failure = 0

    def _add_remark(self, kind: LogRemarkKind, line_number: int) -> None:
        """Count a remark under the line in which it first appeared."""
        remark = self._remarks.get(kind)
        if remark is None:
            self._remarks[kind] = LogRemark(kind=kind, line_number=line_number, count=1)
        else:
            self._remarks[kind] = LogRemark(
                kind=kind, line_number=remark.line_number, count=remark.count + 1
            )

    def _add_exception(
        self, exception: re.Match[str], message: Message, key: str, line_number: int
    ) -> list[LogEvent]:
        """Add an exception's failure. Without a traceback, only known messages are accepted."""
        name = exception[2]
        text = exception[3] or ""
        pattern, match = _find_failure(text, name)
        # An exception without a traceback may be a quotation, so only known messages are accepted.
        if pattern is None and key not in self._frames:
            return []
        # These exceptions end a process on request. If the level is below ERROR, vLLM has caught
        # the exception. For example, vLLM logs a missing module in this way.
        is_end_on_request = name in {"SystemExit", "KeyboardInterrupt", "CancelledError"}
        if is_end_on_request or message.is_below_error:
            self._frames.pop(key, None)
            return []
        return self._add_failure(pattern, match, message, key, line_number, exception=name)

    def _add_failure(
        self,
        pattern: FailurePattern | None,
        match: re.Match[str] | None,
        message: Message,
        key: str,
        line_number: int,
        *,
        exception: str | None,
    ) -> list[LogEvent]:
        """Keep a failure with its figures and its place, and return its event."""
        kind = LogFailureKind.EXCEPTION
        figures: dict[str, float] = {}
        refusal = None
        if pattern is not None and match is not None:
            kind = pattern.kind
            figures = _read_figures(pattern.figures, match)
            if kind is LogFailureKind.GPU_OUT_OF_MEMORY:
                refusal = read_refusal(match.string[match.start() :])
        # These exceptions are consequences in the server. The cause is in the engine core.
        if exception in {"EngineDeadError", "AsyncEngineDeadError", "BrokenPipeError"}:
            kind = LogFailureKind.ENGINE_DIED
        failure = LogFailure(
            kind=kind,
            line_number=line_number,
            time=_read_time(message),
            process=message.process,
            phase=self._phase,
            code_line=message.code_line,
            exception=exception,
            frames=tuple(self._frames.pop(key, ())),
            refusal=refusal,
            figures=figures,
        )
        # A failure is often logged by every process that observes it.
        is_repeated = any(
            earlier.kind is kind and earlier.refusal == refusal and earlier.figures == figures
            for earlier in self._failures
        )
        self._loads_since_failure = 0
        if not is_repeated and len(self._failures) < MOST_FAILURES:
            self._failures.append(failure)
        return [
            self.note(LogEventKind.FAILURE, message, line_number, figures=figures, failure=failure)
        ]

    def build(self, *, is_followed: bool) -> EngineStart:
        """Return the record of the start."""
        model = self._model
        for arguments in (self._arguments, self._config):
            # Each engine uses a different name, so the first name that is set is used.
            for name in ("model", "model_tag", "model_path"):
                if model is None and isinstance(arguments.get(name), str):
                    model = str(arguments[name])
        return EngineStart(
            engine=self.engine,
            version=self.version,
            model=model,
            first_line=self._first_line,
            last_line=self._last_line,
            begin=self._begin,
            end=self._end,
            arguments=dict(self._arguments),
            config=dict(self._config),
            processes=tuple(self._build_process(key) for key in self._figures),
            failures=tuple(self._failures),
            remarks=tuple(self._remarks.values()),
            phase=self._phase,
            is_followed=is_followed,
            is_stopped=self._is_stopped,
            recent_events=tuple(self._events),
        )

    def _build_process(self, key: str) -> ProcessFigures:
        """Return the figures of one process, each with the line number in the log."""
        figures: dict[str, Any] = {}
        for field, value in self._figures[key].items():
            if field in ProcessFigures.__struct_fields__:
                is_whole = not field.endswith("_ratio") and not isinstance(value, str)
                figures[field] = round(value) if is_whole else value
        lines = self._figure_lines.get(key, {})
        return ProcessFigures(
            name=self._names.get(key, ""),
            pid=self._pids.get(key),
            lines={field: lines[field] for field in figures if field in lines},
            **figures,
        )


def _read_figures(fields: tuple[tuple[str, float], ...], match: re.Match[str]) -> dict[str, float]:
    """Return the figures in a line, omitting missing and implausible ones."""
    figures: dict[str, float] = {}
    for (field, unit), text in zip(fields, match.groups(), strict=False):
        if text is None:
            continue
        value = float(text.replace(",", "")) * unit
        if abs(value) <= LARGEST_FIGURE:
            figures[field] = figures.get(field, 0.0) + value
    return figures


def read_refusal(text: str) -> Refusal:
    """Return the figures in torch's message about a refused allocation."""
    sizes: dict[str, int] = {}
    for field, pattern in REFUSAL_SIZES:
        size_bytes = _read_size(pattern.search(text))
        if size_bytes is not None:
            sizes[field] = size_bytes
    # torch reports reserved and allocated memory. The difference is torch's cache.
    reserved_bytes = _read_size(RESERVED.search(text))
    if reserved_bytes is not None and "allocated_bytes" in sizes:
        sizes["cached_bytes"] = max(0, reserved_bytes - sizes["allocated_bytes"])
    other_bytes = [_read_size(match) or 0 for match in OTHER_PROCESS.finditer(text)]
    # In a container, the driver's pids differ from torch's. With different pids, the process itself
    # is listed as one of the "others".
    if other_bytes and "process_bytes" not in sizes:
        largest_bytes = max(other_bytes)
        if largest_bytes >= sizes.get("allocated_bytes", 0):
            sizes["process_bytes"] = largest_bytes
            other_bytes.remove(largest_bytes)
    if other_bytes:
        sizes["other_bytes"] = sum(other_bytes)
    gpu = REFUSAL_GPU.search(text)
    return Refusal(gpu=None if gpu is None else int(gpu[1]), **sizes)


def _read_size(match: re.Match[str] | None) -> int | None:
    """Return a size in torch's format as bytes, or None if there is none."""
    if match is None:
        return None
    number, unit = [group for group in match.groups() if group is not None]
    try:
        size_bytes = float(number) * SIZE_BYTES[unit]
    except ValueError:
        return None
    return round(size_bytes) if size_bytes <= LARGEST_FIGURE else None


def _find_failure(
    text: str, exception: str | None
) -> tuple[FailurePattern, re.Match[str]] | tuple[None, None]:
    """Return a message's pattern and the match, or (None, None) if no pattern matches."""
    patterns = FAILURES_BY_HEAD.get(text[:HEAD_CHARACTERS], ())
    # This check is cheap. Most lines lack the hint and need not be compared with every pattern.
    if exception is not None or FAILURE_HINT.search(text):
        patterns += FAILURES_BY_HEAD[ANY_HEAD]
    for pattern in patterns:
        if pattern.exceptions and exception not in pattern.exceptions:
            continue
        match = pattern.pattern.match(text)
        if match is not None:
            return pattern, match
    return None, None


def _is_failure(text: str) -> bool:
    """Return whether a line without an engine's prefix reports a failure."""
    exception = EXCEPTION.match(text)
    if exception is not None:
        text = exception[3] or ""
    return _find_failure(text, None if exception is None else exception[2])[0] is not None


def _read_time(message: Message) -> LogTime:
    return LogTime(seconds=message.seconds, clock=message.clock)


def _clean(version: str) -> str | None:
    """Return the part of a text that is a version number."""
    match = re.match(r"\d{1,4}\.\d{1,4}[\w.+-]{0,40}", version)
    return None if match is None else match[0]
