"""The content of an engine's log: a record of each start, and the events."""

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct

from vllm_headroom.vocabulary import LogEventKind, LogFailureKind, LogRemarkKind, StartPhase

Scalar = str | int | float | bool | None
"""The value of an argument."""

CONSEQUENCES: Final = (LogFailureKind.EXCEPTION, LogFailureKind.ENGINE_DIED)
"""Failures that are consequences of others, with the more informative kind first. A failure of any
other kind indicates a cause.
"""


class LogTime(Struct, frozen=True, kw_only=True):
    """When a log line was written."""

    seconds: float | None = None
    """Seconds since the epoch, according to the container's runtime or journald. The time is None
    if neither the runtime nor journald wrote one.
    """

    clock: str | None = None
    """The engine's own "MM-DD HH:MM:SS", in its machine's time zone, or None if missing."""


class LogFrame(Struct, frozen=True):
    """A traceback frame inside the engine's code."""

    file: str
    """The path, starting with the package: vllm/v1/worker/gpu_worker.py."""

    line: int
    function: str


class Refusal(Struct, frozen=True, kw_only=True):
    """An allocation that torch refused, with sizes in bytes.

    A field is None if the message lacks the figure.
    """

    asked_bytes: int | None = None
    gpu: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None

    process_bytes: int | None = None
    """The memory that the process held on the GPU, including memory outside torch."""

    other_bytes: int | None = None
    """The memory that other processes held, according to the message."""

    allocated_bytes: int | None = None
    """The memory that torch had given to tensors."""

    graph_bytes: int | None = None
    """The part of `allocated_bytes` in private pools, which CUDA graphs use."""

    cached_bytes: int | None = None
    """The memory that torch had reserved but not given to a tensor."""


class LogFailure(Struct, frozen=True, kw_only=True):
    """A failure, and the line that reports it."""

    kind: LogFailureKind
    line_number: int
    time: LogTime
    process: str
    phase: StartPhase
    code_line: str | None = None
    """The file and line of the code that logged the failure, or None."""

    exception: str | None = None
    """The name of the exception, without its module."""

    frames: tuple[LogFrame, ...] = ()
    """The last frames inside the engine's code, with the innermost last."""

    refusal: Refusal | None = None
    figures: Mapping[str, float] = {}
    """The figures in the message. Each name ends in its unit."""


class LogRemark(Struct, frozen=True, kw_only=True):
    """A warning that is relevant to memory."""

    kind: LogRemarkKind
    line_number: int
    """The line where the warning first appeared."""

    count: int


class LogEvent(Struct, frozen=True, kw_only=True):
    """An event reported by a line."""

    kind: LogEventKind
    line_number: int
    time: LogTime
    process: str
    figures: Mapping[str, float] = {}
    """The figures in the line. Each name ends in its unit."""

    failure: LogFailure | None = None
    remark: LogRemarkKind | None = None


class ProcessFigures(Struct, frozen=True, kw_only=True):
    """What one process of the engine logs about its GPU.

    A figure is None if it is not logged. Sizes are in bytes, and as precise as the log: vLLM rounds
    to 0.01 GiB.
    """

    name: str
    """The engine's name for the process, such as EngineCore or Worker_TP0, or ""."""

    pid: int | None = None
    lines: Mapping[str, int] = {}
    """The line number of each figure."""

    device_name: str | None = None
    total_bytes: int | None = None
    free_at_start_bytes: int | None = None
    used_at_start_bytes: int | None = None
    non_torch_at_start_bytes: int | None = None
    utilization_ratio: float | None = None
    requested_bytes: int | None = None
    weights_bytes: int | None = None
    profiled_weights_bytes: int | None = None
    """The weights as counted by the profile run. With a draft model or an encoder, vLLM may log
    other weights.
    """

    loading_peak_bytes: int | None = None
    torch_peak_bytes: int | None = None
    """torch's peak in the profile run, including the weights (vLLM 0.6)."""

    activation_bytes: int | None = None
    non_torch_bytes: int | None = None
    total_non_kv_bytes: int | None = None
    free_after_profile_bytes: int | None = None
    graphs_estimated_bytes: int | None = None
    graphs_bytes: int | None = None
    graph_piecewise_count: int | None = None
    graph_full_count: int | None = None
    graph_largest_tokens: int | None = None
    kv_cache_bytes: int | None = None
    kv_cache_tokens: int | None = None
    kv_cache_blocks: int | None = None
    block_tokens: int | None = None
    cpu_blocks: int | None = None
    concurrency_ratio: float | None = None
    """How many requests of `concurrency_tokens` tokens fit at the same time."""

    concurrency_tokens: int | None = None
    context_tokens: int | None = None
    batched_tokens: int | None = None
    max_num_seqs: int | None = None
    kv_cache_within_budget_bytes: int | None = None
    """The value of --kv-cache-memory that vLLM recommends for staying within its budget."""

    kv_cache_whole_gpu_bytes: int | None = None
    """The value of --kv-cache-memory that vLLM recommends for using the whole GPU."""


class EngineStart(Struct, frozen=True, kw_only=True):
    """One start of an engine, until the next start or the log's end."""

    engine: str
    """The engine: vllm, sglang or tensorrt_llm."""

    version: str | None
    model: str | None
    first_line: int
    last_line: int
    begin: LogTime
    end: LogTime
    arguments: Mapping[str, Scalar]
    """The command-line options, without secrets and without texts that may contain secrets."""

    config: Mapping[str, Scalar]
    """The resulting configuration of the engine, with the same omissions."""

    processes: tuple[ProcessFigures, ...]
    failures: tuple[LogFailure, ...]
    remarks: tuple[LogRemark, ...]
    phase: StartPhase
    """The phase that the engine has reached."""

    is_followed: bool
    """Whether the log contains a later start."""

    is_stopped: bool
    """Whether the engine logged that it was shutting down on request."""

    recent_events: tuple[LogEvent, ...]
    """The newest events, with the newest last."""

    @property
    def has_served(self) -> bool:
        """Return whether the engine has ever been ready for requests."""
        return self.phase is StartPhase.SERVING

    @property
    def root_failure(self) -> LogFailure | None:
        """Return the failure that ended the start: the earliest one that is not a consequence.

        Returns None if the log contains no failure.
        """
        if not self.failures:
            return None
        return min(self.failures, key=_rank_failure)

    def find_largest(self, field: str) -> int | float | None:
        """Return the largest value of this figure among the processes, or None if unknown."""
        return max(self._list_figures(field), default=None)

    def find_smallest(self, field: str) -> int | float | None:
        """Return the smallest value of this figure among the processes, or None if unknown."""
        return min(self._list_figures(field), default=None)

    def find_option(self, *names: str) -> Scalar:
        """Return an option's value, as set or as chosen by the engine.

        The option has one of these names. Returns None if the value is unknown.
        """
        for options in (self.arguments, self.config):
            for name in names:
                value = options.get(name)
                if value is not None:
                    return value
        return None

    def find_line(self, field: str) -> int | None:
        """Return the number of the first line with this figure, or None."""
        return min((p.lines[field] for p in self.processes if field in p.lines), default=None)

    def _list_figures(self, field: str) -> Iterable[int | float]:
        figures = (getattr(process, field) for process in self.processes)
        return [figure for figure in figures if figure is not None]


class EngineLog(Struct, frozen=True, kw_only=True):
    """The content of a whole log."""

    starts: tuple[EngineStart, ...]
    """The newest starts, in the order of the log."""

    start_count: int
    """The number of starts in the log. `starts` contains only the newest ones."""

    line_count: int


class LogEnding(Struct, frozen=True, kw_only=True):
    """What the engine's log reports about the end of a run."""

    failure: LogFailure | None = None
    """The failure that the log reports, or None if there is none."""

    is_stopped: bool = False
    """Whether the log reports that the engine shut down on request."""

    seconds: float | None = None
    """When the log reports the end, in seconds since the epoch, or None if unknown."""


class LogReading(Struct, frozen=True, kw_only=True):
    """What has been read from the engine's log so far."""

    start: EngineStart | None
    """The newest start, or None before the first line from an engine."""

    endings: tuple[LogEnding, ...] = ()
    """How the newest starts ended, according to the log, with the newest last."""

    newest_seconds: float | None = None
    """When the newest line arrived, in seconds since the epoch. The time is None if there is no
    line yet.
    """


LOGGED_END_SECONDS: Final = 120.0
"""An exit in the log matches an observed exit at most this far away. The server of a failed core
may keep running for another minute.
"""

COMPLETE_LOG_SECONDS: Final = 10.0
"""A log without an error is complete after this much time since an exit. A line of containerd or
journald arrives within a second. The API server is polled every ten seconds.
"""

STALE_LOG_SECONDS: Final = 60.0
"""A log whose newest line is older than this at an exit proves nothing. An old log may be
incomplete or belong to another engine. A working vLLM logs its load every 10 s.
"""


def find_log_ending(
    reading: LogReading, end_seconds: float, now_seconds: float
) -> LogEnding | None:
    """Return what the log shows about an exit at `end_seconds`, or None.

    If the log continues until the exit and reports no failure, there was none. In that case, the
    result is an ending without a failure.
    """
    # The newest exit in the log is the most likely to match this exit.
    for ending in reversed(reading.endings):
        if ending.seconds is None:
            continue
        if abs(end_seconds - ending.seconds) <= LOGGED_END_SECONDS:
            return ending
    newest_seconds = reading.newest_seconds
    if newest_seconds is None or now_seconds < end_seconds + COMPLETE_LOG_SECONDS:
        return None
    # Lines from shortly before the exit show that the log was being followed until then.
    is_whole = newest_seconds >= end_seconds - STALE_LOG_SECONDS
    return LogEnding(seconds=newest_seconds) if is_whole else None


def _rank_failure(failure: LogFailure) -> tuple[int, int]:
    """Return a sort key that puts causes before consequences, and earlier lines first."""
    kind = failure.kind
    consequence = 1 + CONSEQUENCES.index(kind) if kind in CONSEQUENCES else 0
    return consequence, failure.line_number
