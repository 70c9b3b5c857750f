"""The facts in the header of an incident, which a later reader cannot derive from its samples."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, get_args, get_origin

import msgspec
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from vllm_headroom.derive.life.record import MEMORY_REASONS, SAME_END_SECONDS
from vllm_headroom.derive.verdicts import GPU_LOST
from vllm_headroom.model import Ending, GpuAtEnd
from vllm_headroom.parse.fields import LARGEST
from vllm_headroom.trace.entries import YEAR_10000
from vllm_headroom.units import format_size
from vllm_headroom.vocabulary import EndCause, ExitReason, IncidentKind, LeakState, Sureness

Seconds = Annotated[float, Meta(ge=0, lt=YEAR_10000)]
"""Since the epoch."""

Size = Annotated[int, Meta(ge=0, le=LARGEST)]
"""In bytes."""

MOST_SHOWN: Final = 100
"""Our choice: of a longer list in a header, the newest entries are shown."""

LEAK_RANKS: Final = {LeakState.GROWING: 1, LeakState.LEAKING: 2}
"""Of two verdicts on a leak the one of higher rank counts; any other state has 0."""

PEAK_BEFORE_SECONDS: Final = 60.0
"""The highest use in this time before the newest sample counts as its peak."""


class EngineEvent(Struct, frozen=True, kw_only=True):
    """An exit or a stall of the engine."""

    t: Seconds
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
    """A process that held memory of a GPU, which the driver may not size."""

    uuid: str
    pid: int
    used: Size | None = None


class TorchMemory(Struct, frozen=True, kw_only=True):
    """torch's memory on a GPU."""

    uuid: str
    allocated_bytes: Size | None = None
    reserved_bytes: Size | None = None


class ProbedMemory(Struct, frozen=True, kw_only=True):
    """A process with a probe, by its last file."""

    pid: int | None = None
    role: str | None = None
    devices: tuple[TorchMemory, ...] = ()


class MappingGrowth(Struct, frozen=True, kw_only=True):
    """By how much a process's resident memory grew between two readings, by kind of mapping."""

    pid: int
    role: str | None = None
    since: Seconds | None = None
    t: Seconds | None = None
    kinds: dict[str, Size] = field(default_factory=dict)
    """In bytes."""


class LastInService(Struct, frozen=True, kw_only=True):
    """What was known at the last sample in service."""

    verdicts: tuple[RecordedVerdict, ...] = ()
    leaks: tuple[GpuLeak, ...] = ()
    holders: tuple[MemoryHolder, ...] = ()
    probe: tuple[ProbedMemory, ...] = ()
    mappings: tuple[MappingGrowth, ...] = ()
    used: dict[str, tuple[tuple[Seconds, Size], ...]] = field(default_factory=dict)
    """The time and the memory in use between samples, by UUID."""


class Xid(Struct, frozen=True, kw_only=True):
    """An error of the driver."""

    t: Seconds
    uuid: str
    xid: int


class Oom(Struct, frozen=True, kw_only=True):
    """An OutOfMemoryError of torch, by the probe, in bytes."""

    uuid: str | None = None
    asked: Size | None = None
    free: Size | None = None
    allocated: Size | None = None
    reserved: Size | None = None

    def describe(self) -> str:
        """Return the error in a sentence."""
        sentence = (
            f"torch raised OutOfMemoryError on {self.uuid}: "
            f"{format_amount(self.asked)} asked, {format_amount(self.free)} free"
        )
        if self.reserved is not None:
            sentence += f", {format_size(self.reserved)} its own"
        if self.allocated is not None:
            sentence += f", {format_size(self.allocated)} in use"
        return sentence


def find_decisive(events: Sequence[EngineEvent]) -> EngineEvent:
    """Return the event that an incident is judged by.

    That is the first, or the exit for memory that followed it at once.
    """
    earliest = events[0]
    exits = [event for event in events if event.what is IncidentKind.ENDED]
    if not exits:
        return earliest
    seconds_between = exits[0].t - earliest.t
    # A server answers for seconds without its core, which a tick may have seen as a stall.
    is_same_end = 0 <= seconds_between <= SAME_END_SECONDS
    if is_same_end and exits[0].reason in MEMORY_REASONS:
        return exits[0]
    return earliest


class Incident(EngineEvent, frozen=True, kw_only=True):
    """The facts of an incident: its decisive event with the cause, and what was known.

    The fields are the schema of the header. One that is missing or does not fit is empty: other
    versions may write more, or less.
    """

    version: str | None = None
    cause: EndCause | None = None
    sure: Sureness | None = None
    sentence: str | None = None
    events: tuple[EngineEvent, ...] = ()
    before: LastInService = LastInService()
    xids: tuple[Xid, ...] = ()
    ooms: tuple[Oom, ...] = ()
    log: tuple[str, ...] = ()


def read_incident(header: Mapping[str, Any]) -> Incident | None:
    """Return the facts of an incident without what does not fit; None without a time and a kind."""
    return _fit_struct(header, Incident)  # type: ignore[no-any-return]


def _fit(value: object, kind: Any) -> Any:  # noqa: ANN401 - a type of the schema, and a value of it
    """Return the part of a value that fits its type; None where nothing does."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        return _fit_struct(value, kind)
    inner_kinds = get_args(kind)
    if get_origin(kind) is tuple and inner_kinds[-1] is ...:
        return _fit_items(value, inner_kinds[0])
    if get_origin(kind) is dict:
        return _fit_values(value, inner_kinds[1])
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return None


def _fit_struct(value: object, kind: type[Struct]) -> Any:  # noqa: ANN401 - a value of the kind
    # What is no struct at all still gives one, where none of its fields is needed.
    document = value if isinstance(value, Mapping) else {}
    fields = {}
    for column in msgspec.structs.fields(kind):
        if column.name in document:
            fitting = _fit(document[column.name], column.type)
            if fitting is not None:
                fields[column.name] = fitting
    try:
        return kind(**fields)
    except TypeError:  # a field that it needs is missing
        return None


def _fit_items(value: object, kind: Any) -> tuple[Any, ...]:  # noqa: ANN401 - a type of the schema
    if not isinstance(value, list):
        return ()
    fitting_items = (_fit(item, kind) for item in value)
    return tuple(item for item in fitting_items if item is not None)


def _fit_values(value: object, kind: Any) -> dict[str, Any]:  # noqa: ANN401 - a type of the schema
    if not isinstance(value, dict):
        return {}
    fitting_values = {name: _fit(item, kind) for name, item in value.items()}
    return {name: item for name, item in fitting_values.items() if item is not None}


def format_amount(n_bytes: int | None) -> str:
    """Format an amount of memory, which the driver may not report."""
    return "an amount not known" if n_bytes is None else format_size(n_bytes)


def add_evidence(end: Ending, incident: Incident) -> Ending:
    """Return the end with what its incident has beside the samples.

    That is peaks, leaks, XIDs and failed allocations.
    """
    hung_seconds = end.hung_seconds
    if hung_seconds is not None:
        hung_seconds = incident.progress_age_seconds or hung_seconds
    return replace(
        end,
        gpus=tuple(_add_gpu_evidence(gpu, incident.before) for gpu in end.gpus),
        hung_seconds=hung_seconds,
        xids=tuple(error.xid for error in incident.xids[-MOST_SHOWN:]),
        ooms=tuple(oom.describe() for oom in incident.ooms[-MOST_SHOWN:]),
        is_probed=any(process.devices for process in incident.before.probe),
        unreadable=tuple(
            verdict.sentence for verdict in incident.before.verdicts if verdict.alert == GPU_LOST
        ),
    )


def _add_gpu_evidence(gpu: GpuAtEnd, context: LastInService) -> GpuAtEnd:
    """Return the GPU with the peak between its last samples and the surer verdict on a leak."""
    peak_begin_seconds = gpu.newest_seconds - PEAK_BEFORE_SECONDS
    late_bytes = [
        used_bytes
        for at_seconds, used_bytes in context.used.get(gpu.uuid, ())
        if at_seconds >= peak_begin_seconds
    ]
    gpu = gpu.raise_peak(max(late_bytes, default=0))
    # This record alone may be too short for the detector's verdict.
    leaks = {leak.uuid: leak for leak in context.leaks}
    leak = leaks.get(gpu.uuid)
    if leak is None or LEAK_RANKS.get(leak.state, 0) <= LEAK_RANKS.get(gpu.leak, 0):
        return gpu
    bytes_per_request = leak.leak_bytes_per_request or gpu.leak_bytes_per_request
    return replace(gpu, leak=leak.state, leak_bytes_per_request=bytes_per_request)
