"""The facts in the header of an incident, which a later reader cannot derive from its samples."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, get_args, get_origin

import msgspec
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from vllm_headroom.derive.life.case import MEMORY_REASONS, SEQUENCE_SECONDS
from vllm_headroom.derive.verdicts import GPU_LOST
from vllm_headroom.model import Ending
from vllm_headroom.parse.fields import LARGEST
from vllm_headroom.trace.entries import YEAR_10000
from vllm_headroom.units import format_size
from vllm_headroom.vocabulary import EndCause, ExitReason, IncidentKind, LeakState, Sureness

Seconds = Annotated[float, Meta(ge=0, lt=YEAR_10000)]
"""Since the epoch."""
Size = Annotated[int, Meta(ge=0, le=LARGEST)]
"""In bytes."""
MOST_SHOWN: Final = 100
SURENESS: Final = {LeakState.GROWING: 1, LeakState.LEAKING: 2}
"""Of two verdicts on a leak the surer is taken."""

PEAK_SECONDS: Final = 60.0
"""The highest use in this time before the newest sample counts as its peak."""


class EngineEvent(Struct, frozen=True, kw_only=True):
    """An exit or a stall of the engine."""

    t: Seconds
    what: IncidentKind
    reason: ExitReason | None = None
    progress_age_seconds: Annotated[float, Meta(ge=0, le=LARGEST)] | None = None


class Said(Struct, frozen=True, kw_only=True):
    """A verdict of the sidecar."""

    sentence: str
    alert: str | None = None


class GpuLeak(Struct, frozen=True, kw_only=True):
    """The leak detector's verdict on a GPU."""

    uuid: str
    state: LeakState = LeakState.UNKNOWN
    leak_bytes_per_request: float | None = None


class Holder(Struct, frozen=True, kw_only=True):
    """A process that held memory of a GPU, which the driver may not size."""

    uuid: str
    pid: int
    used: Size | None = None


class TorchMemory(Struct, frozen=True, kw_only=True):
    """torch's memory on a GPU."""

    uuid: str
    allocated_bytes: Size | None = None
    reserved_bytes: Size | None = None


class Probed(Struct, frozen=True, kw_only=True):
    """A process with a probe, by its last file."""

    pid: int | None = None
    role: str | None = None
    devices: tuple[TorchMemory, ...] = ()


class MappingGrowth(Struct, frozen=True, kw_only=True):
    """By how much the resident memory of a process's mappings grew by kind, between two readings, in bytes."""

    pid: int
    role: str | None = None
    since: Seconds | None = None
    t: Seconds | None = None
    kinds: dict[str, Size] = field(default_factory=dict)


class Before(Struct, frozen=True, kw_only=True):
    """What was known at the last sample in service; `used` has time and memory in use between samples, by UUID."""

    verdicts: tuple[Said, ...] = ()
    leaks: tuple[GpuLeak, ...] = ()
    holders: tuple[Holder, ...] = ()
    probe: tuple[Probed, ...] = ()
    mappings: tuple[MappingGrowth, ...] = ()
    used: dict[str, tuple[tuple[Seconds, Size], ...]] = field(default_factory=dict)


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
        own = "" if self.reserved is None else f", {format_size(self.reserved)} its own"
        used = "" if self.allocated is None else f", {format_size(self.allocated)} in use"
        free = f"{format_amount(self.asked)} asked, {format_amount(self.free)} free"
        return f"torch raised OutOfMemoryError on {self.uuid}: {free}{own}{used}"


def find_decisive(events: Sequence[EngineEvent]) -> EngineEvent:
    """Return the event that an incident is judged by: the first, or the exit for memory that followed it at once."""
    ended = next((each for each in events if each.what is IncidentKind.ENDED), events[0])
    is_one = 0 <= ended.t - events[0].t <= SEQUENCE_SECONDS and ended.reason in MEMORY_REASONS
    return ended if is_one else events[0]


class Incident(EngineEvent, frozen=True, kw_only=True):
    """The facts of an incident: its decisive event, its cause, all events, and what was known; the header's schema.

    A field that is missing or does not fit is empty: other versions may write more, or less.
    """

    version: str | None = None
    cause: EndCause | None = None
    sure: Sureness | None = None
    sentence: str | None = None
    events: tuple[EngineEvent, ...] = ()
    before: Before = Before()
    xids: tuple[Xid, ...] = ()
    ooms: tuple[Oom, ...] = ()
    log: tuple[str, ...] = ()


def read_incident(known: Mapping[str, Any]) -> Incident | None:
    """Return the facts of an incident without what does not fit; None without a time and a kind."""
    return _fit(known, Incident)  # type: ignore[no-any-return]


def _fit(value: object, kind: Any) -> Any:  # noqa: ANN401 - a type of the schema, and a value of it
    """Return the part of a value that fits its type; None where nothing does."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        given = value if isinstance(value, Mapping) else {}
        known = {
            each.name: _fit(given[each.name], each.type)
            for each in msgspec.structs.fields(kind)
            if each.name in given
        }
        try:
            return kind(**{name: fitting for name, fitting in known.items() if fitting is not None})
        except TypeError:  # a field that it needs is missing
            return None
    inner = get_args(kind)
    if get_origin(kind) is tuple and inner[-1] is ...:
        items = value if isinstance(value, list) else []
        return tuple(fitting for each in items if (fitting := _fit(each, inner[0])) is not None)
    if get_origin(kind) is dict:
        named = value.items() if isinstance(value, dict) else ()
        return {
            name: fitting for name, each in named if (fitting := _fit(each, inner[1])) is not None
        }
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return None


def format_amount(n_bytes: int | None) -> str:
    """Format an amount of memory, which the driver may not report."""
    return "an amount not known" if n_bytes is None else format_size(n_bytes)


def add_evidence(end: Ending, known: Incident) -> Ending:
    """Return the end with what its incident knows beside the samples: peaks, leaks, XIDs, failed allocations."""
    lost = (each.sentence for each in known.before.verdicts if each.alert == GPU_LOST)
    leaks = {each.uuid: each for each in known.before.leaks}
    gpus = []
    for gpu in end.gpus:
        since, leak = gpu.newest_seconds - PEAK_SECONDS, leaks.get(gpu.uuid)
        peak = max(
            (used for at, used in known.before.used.get(gpu.uuid, ()) if at >= since), default=0
        )
        found = gpu.raise_peak(peak)
        if leak is not None and SURENESS.get(leak.state, 0) > SURENESS.get(gpu.leak, 0):
            per_request = leak.leak_bytes_per_request or gpu.leak_bytes_per_request
            found = replace(found, leak=leak.state, leak_bytes_per_request=per_request)
        gpus.append(found)
    return replace(
        end,
        gpus=tuple(gpus),
        hung_seconds=None
        if end.hung_seconds is None
        else known.progress_age_seconds or end.hung_seconds,
        xids=tuple(each.xid for each in known.xids[-MOST_SHOWN:]),
        ooms=tuple(each.describe() for each in known.ooms[-MOST_SHOWN:]),
        unreadable=tuple(lost),
    )
