"""Build and read an incident's header: the facts that its samples do not show."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, get_args, get_origin

import msgspec
from msgspec import Meta, Struct, field, to_builtins
from msgspec.structs import asdict, replace

from vllm_headroom.derive.life.causes import judge_ending
from vllm_headroom.derive.life.engine import MEMORY_REASONS, SAME_END_SECONDS
from vllm_headroom.derive.verdicts import GPU_LOST
from vllm_headroom.model import (
    Ending,
    EnginePod,
    GpuAtEnd,
    LogEnding,
    PeakReadings,
    StepAtError,
)
from vllm_headroom.parse.fields import LARGEST
from vllm_headroom.trace.entries import YEAR_10000
from vllm_headroom.units import format_instant, format_size, to_datetime
from vllm_headroom.vocabulary import EndCause, ExitReason, IncidentKind, LeakState, Sureness

EpochSeconds = Annotated[float, Meta(ge=0, lt=YEAR_10000)]
"""A time in seconds since the epoch."""

ByteCount = Annotated[int, Meta(ge=0, le=LARGEST)]
"""A size in bytes."""

MOST_SHOWN_ENTRIES: Final = 100
"""If a header's list is longer than this, only its newest entries are shown."""

LEAK_RANKS: Final = {LeakState.GROWING: 1, LeakState.LEAKING: 2}
"""The rank of a leak verdict. Any other state has rank 0. The verdict with the higher rank is used.
"""

FATAL_ERROR_SECONDS: Final = 60.0
"""An OutOfMemoryError within this time of an exit is taken as its cause. A core that raises it
exits immediately, and its server exits within seconds.
"""

PEAK_BEFORE_SECONDS: Final = 60.0
"""The latest sample's peak is the highest usage within this time before that sample."""


class EngineEvent(Struct, frozen=True, kw_only=True):
    """An exit or stall of the engine."""

    t: EpochSeconds
    what: IncidentKind
    reason: ExitReason | None = None
    progress_age_seconds: Annotated[float, Meta(ge=0, le=LARGEST)] | None = None


class RecordedVerdict(Struct, frozen=True, kw_only=True):
    """A verdict of the sidecar."""

    sentence: str
    alert: str | None = None


class GpuLeak(Struct, frozen=True, kw_only=True):
    """The leak detector's verdict on a GPU."""

    uuid: str
    state: LeakState = LeakState.UNKNOWN
    leak_bytes_per_request: float | None = None


class MemoryHolder(Struct, frozen=True, kw_only=True):
    """A process that held memory on a GPU."""

    uuid: str
    """The UUID of the GPU."""
    pid: int
    used: ByteCount | None = None
    """The bytes that the process held, or None if the driver does not report them."""


class TorchMemory(Struct, frozen=True, kw_only=True):
    """torch's memory on a GPU."""

    uuid: str
    allocated_bytes: ByteCount | None = None
    reserved_bytes: ByteCount | None = None


class ProbedMemory(Struct, frozen=True, kw_only=True):
    """A process with a probe, as described by the probe's last file."""

    pid: int | None = None
    role: str | None = None
    devices: tuple[TorchMemory, ...] = ()
    peaks: PeakReadings = PeakReadings()


class MappingGrowth(Struct, frozen=True, kw_only=True):
    """The growth of a process's resident memory between two readings, by kind of mapping."""

    pid: int
    role: str | None = None
    since: EpochSeconds | None = None
    t: EpochSeconds | None = None
    kinds: dict[str, ByteCount] = field(default_factory=dict)
    """The growth of each kind in bytes."""


class LastInService(Struct, frozen=True, kw_only=True):
    """The facts from the last sample taken while the engine was in service."""

    verdicts: tuple[RecordedVerdict, ...] = ()
    leaks: tuple[GpuLeak, ...] = ()
    holders: tuple[MemoryHolder, ...] = ()
    probe: tuple[ProbedMemory, ...] = ()
    mappings: tuple[MappingGrowth, ...] = ()
    used: dict[str, tuple[tuple[EpochSeconds, ByteCount], ...]] = field(default_factory=dict)
    """Peaks between samples by GPU UUID: the time of each peak, and the memory in use at that time.
    """


class Xid(Struct, frozen=True, kw_only=True):
    """A driver error."""

    t: EpochSeconds
    uuid: str
    xid: int


class Oom(Struct, frozen=True, kw_only=True):
    """An OutOfMemoryError raised by torch and recorded by the probe.

    A size is None if it is unknown.
    """

    t: EpochSeconds | None = None
    uuid: str | None = None
    asked: ByteCount | None = None
    free: ByteCount | None = None
    allocated: ByteCount | None = None
    reserved: ByteCount | None = None
    step: StepAtError | None = None
    """The step that raised the error, or None if unknown."""

    def describe(self) -> str:
        """Return a sentence that describes the error."""
        # A process that runs out of memory on startup may lack its GPU's UUID.
        place = "" if self.uuid is None else f" on {self.uuid}"
        sentence = (
            f"torch raised OutOfMemoryError{place}: "
            f"{format_amount(self.asked)} asked, {format_amount(self.free)} free"
        )
        if self.reserved is not None:
            sentence += f", {format_size(self.reserved)} its own"
        if self.allocated is not None:
            sentence += f", {format_size(self.allocated)} in use"
        if self.step is not None:
            sentence += f", in a step of {self.step.step.describe(self.step.work)}"
        return sentence


class HeldLine(Struct, frozen=True, kw_only=True):
    """The memory held by one line of code in torch's allocator."""

    bytes: ByteCount
    file: str | None = None
    """The end of the file's path. None if memory was allocated before torch recorded a history."""
    line: ByteCount | None = None
    count: ByteCount | None = None
    """The number of blocks that the line allocated."""
    since: EpochSeconds | None = None
    """When the oldest block was allocated, or None if the history no longer showed it."""

    def describe(self) -> str:
        """Return a phrase that names the line of code, its memory and the memory's age."""
        place = "allocated before the history began"
        if self.file is not None:
            place = f"{self.file}:{self.line or 0}"
        blocks = ""
        if self.count is not None:
            blocks = f" in {self.count:,} block{'' if self.count == 1 else 's'}"
        since = "from before the history's oldest event"
        if self.since is not None:
            since = f"since {format_instant(self.since)}"
        return f"{format_size(self.bytes)}{blocks}, {since}: {place}"


class SnapshotFile(Struct, frozen=True, kw_only=True):
    """A snapshot of torch's allocator that the probe wrote when an OutOfMemoryError occurred."""

    t: EpochSeconds
    file: str
    """The path of the file in vLLM's container."""
    pid: int | None = None
    size: ByteCount | None = None
    problem: str | None = None
    """Why the file was not written, or None if it was written."""
    largest: tuple[HeldLine, ...] = ()
    """The lines of code that held the most memory, largest first."""


def find_decisive(events: Sequence[EngineEvent]) -> EngineEvent:
    """Return the event that determines the cause of an incident; `events` must not be empty.

    The decisive event is usually the first one. If an exit for lack of memory follows within
    SAME_END_SECONDS, that exit is decisive instead.
    """
    earliest = events[0]
    exits = [event for event in events if event.what is IncidentKind.ENDED]
    if not exits:
        return earliest
    seconds_between = exits[0].t - earliest.t
    # After its core has exited, a server keeps responding for some seconds. The exit may therefore
    # look like a stall.
    is_same_end = 0 <= seconds_between <= SAME_END_SECONDS
    if is_same_end and exits[0].reason in MEMORY_REASONS:
        return exits[0]
    return earliest


class Incident(EngineEvent, frozen=True, kw_only=True):
    """An incident: its decisive event, its cause, and the facts from before the event.

    The fields define the schema of the header. Other versions may write more or fewer fields. A
    field that is missing or has a different type gets its default.
    """

    version: str | None = None
    engine_pod: EnginePod | None = None
    cause: EndCause | None = None
    sure: Sureness | None = None
    sentence: str | None = None
    events: tuple[EngineEvent, ...] = ()
    before: LastInService = LastInService()
    xids: tuple[Xid, ...] = ()
    ooms: tuple[Oom, ...] = ()
    snapshots: tuple[SnapshotFile, ...] = ()
    engine_log: LogEnding | None = None
    """What the engine's own log reports about the incident. None if the log was not read or reports
    nothing.
    """
    log: tuple[str, ...] = ()


# Building a decoder makes msgspec complete the type before any thread uses it: see StateFile.
msgspec.json.Decoder(Incident)


def read_incident(header: Mapping[str, Any]) -> Incident | None:
    """Return the facts about an incident, or None if its time or kind is missing.

    Values that do not fit the schema are omitted.
    """
    return _fit_struct(header, Incident)  # type: ignore[no-any-return]


def build_header(
    ending: Ending,
    events: Sequence[EngineEvent],
    *,
    version: str,
    pod: EnginePod | None,
    before: Mapping[str, Any],
    xids: Sequence[Xid],
    ooms: Sequence[Oom],
    snapshots: Sequence[SnapshotFile],
    engine_log: LogEnding | None,
    log_lines: Sequence[str],
) -> dict[str, Any]:
    """Return an incident's facts and its most likely cause, for JSON.

    `ending` describes the decisive event of `events` and what the samples show before that event.
    `before` contains the facts from the last sample in service. `xids` and `ooms` are the errors
    that may explain the incident. `snapshots` describes what the allocator held when these errors
    occurred.
    """
    header = {
        **drop_unknown(find_decisive(events)),
        "version": version,
        "engine_pod": drop_unknown(pod),
        "events": [drop_unknown(event) for event in events],
        "before": dict(before),
        "xids": to_builtins(xids),
        "ooms": [_encode_oom(oom) for oom in ooms],
    }
    if snapshots:
        header["snapshots"] = to_builtins(snapshots)
    if engine_log is not None:
        header["engine_log"] = drop_unknown(engine_log)
    header["log"] = list(log_lines)
    # The cause is determined from the header itself. A command that reads the header will therefore
    # find the same cause.
    facts = read_incident(header)
    if facts is not None:
        ending = add_evidence(ending, facts)
    cause = judge_ending(ending)[0]
    return {**header, "cause": cause.cause, "sure": cause.sureness, "sentence": cause.sentence}


def _encode_oom(oom: Oom) -> dict[str, Any]:
    """Return an OutOfMemoryError for JSON; an unknown step is omitted."""
    record: dict[str, Any] = to_builtins(oom)
    del record["step"]
    if oom.step is not None:
        record["step"] = drop_unknown(oom.step)
    return record


def drop_unknown(value: object) -> Any:  # noqa: ANN401 - a value of JSON
    """Return a struct as a dictionary without fields that are None, at any depth.

    Tuples become lists. Any other value is returned unchanged.
    """
    if isinstance(value, Struct):
        fields = asdict(value).items()
        return {name: drop_unknown(field) for name, field in fields if field is not None}
    if isinstance(value, tuple):
        return [drop_unknown(item) for item in value]
    return value


def _fit(value: object, kind: Any) -> Any:  # noqa: ANN401 - a type of the schema, and a value of it
    """Return the part of a value that fits its type, or None."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        return _fit_struct(value, kind)
    inner_kinds = get_args(kind)
    if get_origin(kind) is tuple and inner_kinds[-1] is ...:
        return _fit_items(value, inner_kinds[0])
    if get_origin(kind) is dict:
        return _fit_values(value, inner_kinds[1])
    try:
        return msgspec.convert(value, kind)
    # UnicodeEncodeError is raised for a lone surrogate.
    except (msgspec.ValidationError, UnicodeEncodeError):
        return None


def _fit_struct(value: object, kind: type[Struct]) -> Any:  # noqa: ANN401 - a value of the kind
    """Return a struct with the fields that fit.

    Returns None if a required field does not fit.
    """
    # A value that is not an object becomes empty, so all fields get defaults.
    document = value if isinstance(value, Mapping) else {}
    fields = {}
    for column in msgspec.structs.fields(kind):
        if column.name in document:
            fitting = _fit(document[column.name], column.type)
            if fitting is not None:
                fields[column.name] = fitting
    try:
        return kind(**fields)
    except TypeError:  # A required field is missing.
        return None


def _fit_items(value: object, kind: Any) -> tuple[Any, ...]:  # noqa: ANN401 - a type of the schema
    """Return the items of a list that fit.

    The tuple is empty for any other value.
    """
    if not isinstance(value, list):
        return ()
    fitting_items = (_fit(item, kind) for item in value)
    return tuple(item for item in fitting_items if item is not None)


def _fit_values(value: object, kind: Any) -> dict[str, Any]:  # noqa: ANN401 - a type of the schema
    """Return those entries of an object whose values fit, or {} for any other value."""
    if not isinstance(value, dict):
        return {}
    fitting_values = {name: _fit(item, kind) for name, item in value.items()}
    return {name: item for name, item in fitting_values.items() if item is not None}


def format_amount(n_bytes: int | None) -> str:
    """Format an amount of memory; None means that the amount is unknown."""
    return "an amount not known" if n_bytes is None else format_size(n_bytes)


def add_evidence(end: Ending, incident: Incident) -> Ending:
    """Add to an ending those facts about its incident that the samples do not show.

    The added facts are peaks between samples, leak verdicts, XIDs, failed allocations, and the
    names of GPUs that could not be read.
    """
    # The daemon observed the stall from the beginning, but the samples may begin later.
    hung_seconds = end.hung_seconds
    if hung_seconds is not None:
        hung_seconds = incident.progress_age_seconds or hung_seconds
    return replace(
        end,
        gpus=tuple(_add_gpu_evidence(gpu, incident.before) for gpu in end.gpus),
        hung_seconds=hung_seconds,
        xids=tuple(error.xid for error in incident.xids[-MOST_SHOWN_ENTRIES:]),
        ooms=tuple(oom.describe() for oom in incident.ooms[-MOST_SHOWN_ENTRIES:]),
        failed_step=_describe_failed_step(incident.ooms, end.seconds),
        highest_peak=_describe_highest_peak(incident.before),
        log=incident.engine_log or end.log,
        is_probed=any(process.devices for process in incident.before.probe),
        unreadable=tuple(
            verdict.sentence for verdict in incident.before.verdicts if verdict.alert == GPU_LOST
        ),
    )


def _describe_failed_step(ooms: Sequence[Oom], end_seconds: float) -> str | None:
    """Return the step that ran out of GPU memory near the exit, or None."""
    for oom in reversed(ooms):
        if oom.t is not None and oom.step is not None:
            seconds_before = end_seconds - oom.t
            if abs(seconds_before) <= FATAL_ERROR_SECONDS:
                return oom.step.step.describe(oom.step.work)
    return None


def _describe_highest_peak(context: LastInService) -> str | None:
    """Return the highest peak of the last minute in service.

    Returns None if no peak was measured.
    """
    peaks = [
        (work.recent, work.work)
        for process in context.probe
        for work in process.peaks.works
        if work.recent is not None
    ]
    if not peaks:
        return None
    peak, work = max(peaks, key=lambda entry: entry[0].transient_bytes)
    time = f"{to_datetime(peak.step.at_seconds):%H:%M:%S}"
    size = format_size(peak.transient_bytes)
    return f"the highest peak, {size} at {time}, was a step of {peak.step.describe(work)}"


def _add_gpu_evidence(gpu: GpuAtEnd, context: LastInService) -> GpuAtEnd:
    """Add to a GPU its peak after the last sample.

    The leak verdict is added if it is more certain.
    """
    peak_begin_seconds = gpu.newest_seconds - PEAK_BEFORE_SECONDS
    late_bytes = [
        used_bytes
        for at_seconds, used_bytes in context.used.get(gpu.uuid, ())
        if at_seconds >= peak_begin_seconds
    ]
    # Memory may have filled up after the record's last sample.
    gpu = gpu.raise_peak(max(late_bytes, default=0))
    # The record may have too few samples for the detector. The daemon's verdict is based on a
    # longer record.
    leaks = {leak.uuid: leak for leak in context.leaks}
    leak = leaks.get(gpu.uuid)
    if leak is None or LEAK_RANKS.get(leak.state, 0) <= LEAK_RANKS.get(gpu.leak, 0):
        return gpu
    bytes_per_request = leak.leak_bytes_per_request or gpu.leak_bytes_per_request
    return replace(gpu, leak=leak.state, leak_bytes_per_request=bytes_per_request)
