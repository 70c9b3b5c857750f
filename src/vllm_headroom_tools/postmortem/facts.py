"""The circumstances of an exit, and the header of an incident."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from vllm_headroom.derive.life.lives import is_full
from vllm_headroom.derive.readings import sum_known
from vllm_headroom.derive.verdicts import GPU_LOST
from vllm_headroom.model import Device, EngineReading
from vllm_headroom.parse.fields import LARGEST
from vllm_headroom.trace.flight import FLIGHT, INCIDENTS, IncidentKind, find_decisive, list_incidents, parse_known
from vllm_headroom.trace.parse import YEAR_10000, BadInput, read_lines
from vllm_headroom.units import format_size
from vllm_headroom.vocabulary import ExitReason, LeakState, Role
from vllm_headroom_tools.history import Moment


class GpuAtEnd(Device, frozen=True, kw_only=True):
    """One of the engine's GPUs before the exit; None is unknown.

    `first_…` is of the begin of serving, or else of the record; `last_…` the highest use, or the least room, of the
    last minute and a half, peaks included. `grown_bytes` is the growth of the engine between them, `jumped_bytes` the
    part of it within the last minutes. `joined` is whether there were more processes at the end than at first,
    `between` whether the least room was between two samples, where its holder is unknown.
    """

    total_bytes: int | None
    usable_bytes: int | None
    first_room_bytes: int | None
    last_room_bytes: int | None
    last_engine_bytes: int | None
    grown_bytes: int | None
    jumped_bytes: int | None
    first_other_bytes: int | None
    last_other_bytes: int | None
    joined: bool = False
    between: bool = False
    leak: LeakState = LeakState.UNKNOWN
    leaked: Moment | None = None

    @property
    def is_full(self) -> bool:
        """Whether almost no room was left, by the daemon's rule."""
        return self.last_room_bytes is not None and is_full(self.last_room_bytes, self.first_room_bytes)

    @property
    def lost_bytes(self) -> int | None:
        """The room lost until the exit."""
        return subtract(self.last_room_bytes, self.first_room_bytes)

    def share(self, n_bytes: int | None) -> float:
        """Return the share of the lost room that an amount explains; 0 where unknown."""
        return 0.0 if n_bytes is None or not self.lost_bytes else max(0.0, n_bytes / self.lost_bytes)

    @property
    def others_bytes(self) -> int | None:
        """The growth of others."""
        return subtract(self.first_other_bytes, self.last_other_bytes)


def subtract(before: int | None, after: int | None) -> int | None:
    """Return the growth between two amounts; None where one is unknown."""
    return None if before is None or after is None else after - before


class Circumstances(Struct, frozen=True, kw_only=True):
    """An exit or a stall, and what preceded it in that run of the engine.

    The run began at `began_seconds`, possibly before the record; it was observed for `seen_seconds`, last
    `unseen_seconds` before the exit. `served` is whether it ever served, `hung_seconds` the time without progress,
    `answered` whether its page still answered. `first` are the necessary processes that exited before the rest,
    `shut_seconds` how long the server then refused its page. `idle_seconds` is the idle time at the last page; None
    where it had work, or unknown. `xids` and `ooms` are of the last 15 minutes, `lost` the verdicts on unreadable GPUs.
    """

    what: IncidentKind
    seconds: float
    reason: ExitReason | None = None
    began_seconds: float | None = None
    seen_seconds: float = 0.0
    unseen_seconds: float | None = None
    served: bool = False
    hung_seconds: float | None = None
    answered: bool = False
    first: tuple[Role, ...] = ()
    shut_seconds: float | None = None
    engines: tuple[EngineReading, ...] = ()
    idle_seconds: float | None = None
    usual_running: float | None = None
    gpus: tuple[GpuAtEnd, ...] = ()
    xids: tuple[int, ...] = ()
    ooms: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()

    @property
    def order(self) -> tuple[str, ...]:
        """The evidence of which processes went first, none where unknown."""
        return tuple(f"{role.replace('_', ' ')} exited before the others" for role in self.first)

    @property
    def running(self) -> float | None:
        """The running requests on the last page."""
        return sum_known(engine.running for engine in self.engines)

    @property
    def worst(self) -> GpuAtEnd | None:
        """The GPU with the least room left."""
        known = [gpu for gpu in self.gpus if gpu.last_room_bytes is not None]
        return min(known, key=lambda gpu: gpu.last_room_bytes or 0, default=None)

    @property
    def full(self) -> GpuAtEnd | None:
        """A GPU that was full; the one with the least room where the daemon counted an out-of-memory exit."""
        if self.reason is ExitReason.OUT_OF_MEMORY:
            return self.worst
        return next((gpu for gpu in self.gpus if gpu.is_full), None)


MOST_SHOWN: Final = 100
Header = Mapping[str, Any]


def find_trace(given: Path) -> Path:
    """Return the trace to read: a file itself, or the newest incident of a folder; raises BadInput."""
    if not given.is_dir():
        return given
    try:
        found = list_incidents(given / INCIDENTS) or list_incidents(given)
    except OSError as error:
        raise BadInput(f"{given}: cannot be read: {error.strerror}") from error
    if found:
        return found[-1]
    record = given / FLIGHT
    hint = f"; {record} is the newest record" if record.exists() else ""
    raise BadInput(f"{given}: has no incident, which the daemon saves when the engine exits or stalls{hint}")


def read_header(file: Path) -> Header:
    """Read the header of an incident, empty for another trace; raises BadInput."""
    try:
        with file.open("rb") as stream:
            header = parse_known(next(read_lines(stream), b""))
    except OSError as error:
        raise BadInput(f"{file}: cannot be read: {error.strerror}") from error
    if header is None:
        return {}
    if not _is_time(header.get("t")) or str(header.get("what")) not in set(IncidentKind):
        raise BadInput(
            f"{file}: line 1: the header of an incident has a time `t`, and `what`: {' or '.join(IncidentKind)}"
        )
    events = (each for each in read_records(header, "events") if _is_time(each.get("t")) and "what" in each)
    return {**header, **find_decisive((header, *events))}


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < YEAR_10000


def read_progress_age(header: Header) -> float | None:
    """Return the time without progress at a stall, which a trace lacks for a canary."""
    age = header.get("progress_age_seconds")
    return float(age) if isinstance(age, int | float) and 0 <= age <= LARGEST else None


def read_leaks(header: Header) -> dict[str, LeakState]:
    """Return the leak state of each GPU, by UUID."""
    leaks = read_records(read_before(header), "leaks")
    return {
        str(each.get("uuid")): state for each in leaks for state in LeakState if str(state) == str(each.get("state"))
    }


def read_xids(header: Header) -> tuple[int, ...]:
    """Return the XIDs shortly before the exit."""
    return tuple(each["xid"] for each in read_records(header, "xids") if isinstance(each.get("xid"), int))


def read_ooms(header: Header) -> tuple[str, ...]:
    """Return the OutOfMemoryErrors of torch shortly before the exit, by the probe."""
    return tuple(
        f"torch raised OutOfMemoryError on {each.get('uuid')}: {_format_amount(each, 'asked')}"
        f" asked, {_format_amount(each, 'free')} free"
        + ("" if each.get("reserved") is None else f", {_format_amount(each, 'reserved')} its own")
        + ("" if each.get("allocated") is None else f", {_format_amount(each, 'allocated')} in use")
        for each in read_records(header, "ooms")
    )


def read_used(header: Header) -> dict[str, list[tuple[float, int]]]:
    """Return times and memory in use between samples, by UUID of a GPU."""
    found = read_before(header).get("used")
    looks = found.items() if isinstance(found, dict) else ()
    return {uuid: [(at, n) for at, n in filter(_is_look, seen)] for uuid, seen in looks if isinstance(seen, list)}


def _is_look(value: object) -> bool:
    if not isinstance(value, list) or not all(type(each) in {int, float} for each in value):
        return False
    return len(value) == 2 and 0 <= value[0] < YEAR_10000 and 0 <= value[1] <= LARGEST  # noqa: PLR2004 - as said


def read_lost_gpus(header: Header) -> tuple[str, ...]:
    """Return the verdicts on the engine's GPUs that could not be read."""
    verdicts = read_records(read_before(header), "verdicts")
    return tuple(str(each["sentence"]) for each in verdicts if each.get("alert") == GPU_LOST and each.get("sentence"))


def read_sentences(header: Header) -> tuple[str, ...]:
    """Return the sentences of the verdicts."""
    return tuple(
        str(each["sentence"]) for each in read_records(read_before(header), "verdicts") if each.get("sentence")
    )


def list_holders(header: Header) -> Iterator[str]:
    """Yield the holders of memory on the GPUs."""
    for each in read_records(read_before(header), "holders"):
        yield f"{each.get('uuid')} pid {each.get('pid')} {_format_amount(each, 'used')}"


def list_torch_memory(header: Header) -> Iterator[str]:
    """Yield torch's memory on each GPU, by the probe's last files."""
    for process in read_records(read_before(header), "probe"):
        for each in read_records(process, "devices"):
            held = (
                f"{word} {_format_amount(each, f'{word}_bytes')}"
                for word in ("allocated", "reserved")
                if f"{word}_bytes" in each
            )
            yield f"{each.get('uuid')} pid {process.get('pid')} {process.get('role')}: {', '.join(held)}"


def _format_amount(found: Header, name: str) -> str:
    """Format an amount of memory, which the driver may not report."""
    n_bytes = found.get(name)
    return format_size(n_bytes) if type(n_bytes) is int and 0 <= n_bytes <= LARGEST else "an amount not known"


def read_log_lines(header: Header) -> tuple[str, ...]:
    """Return the daemon's last log lines."""
    lines = header.get("log")
    return tuple(map(str, lines[-MOST_SHOWN:])) if isinstance(lines, list) else ()


def read_before(header: Header) -> Header:
    """Return the part of the header on the time before."""
    found = header.get("before")
    return found if isinstance(found, dict) else {}


def read_records(header: Header, side: str) -> tuple[Header, ...]:
    """Return the newest objects of a list in the header."""
    found = header.get(side)
    return tuple(each for each in found[-MOST_SHOWN:] if isinstance(each, dict)) if isinstance(found, list) else ()
