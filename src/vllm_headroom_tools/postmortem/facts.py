"""What is known of an end once a trace has been read up to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from vllm_headroom.derive.life.lives import SHRUNK_RATIO, TIGHT_BYTES
from vllm_headroom.derive.readings import sum_known
from vllm_headroom.derive.verdicts import GPU_LOST
from vllm_headroom.model import Device, EngineReading
from vllm_headroom.parse.fields import LARGEST
from vllm_headroom.trace.flight import FLIGHT, INCIDENTS, IncidentKind, list_incidents, parse_known
from vllm_headroom.trace.parse import YEAR_10000, BadInput, read_lines
from vllm_headroom.units import format_size
from vllm_headroom.vocabulary import ExitReason, LeakState
from vllm_headroom_tools.history.course import Moment


class GpuAtEnd(Device, frozen=True, kw_only=True):
    """A GPU of the engine's before the end; None where it was not known.

    `first_…` is when this life began to serve, or else to be seen, `last_…` the most, or the least room, of the last
    minute and a half, peaks included. `grown_bytes` is how much more the engine held then, `jumped_bytes` how much of
    that came within the last minutes. `joined` is whether more
    processes were on it at the end than at first, `between` whether its least room was seen between samples, where it
    is not told who took it.
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
        """Whether next to nothing was left of what had been, as the daemon tells it."""
        first, last = self.first_room_bytes, self.last_room_bytes
        return last is not None and last <= TIGHT_BYTES and (first is None or last <= SHRUNK_RATIO * first)

    @property
    def lost_bytes(self) -> int | None:
        """How much less room there was at the end."""
        return subtract(self.last_room_bytes, self.first_room_bytes)

    def share(self, n_bytes: int | None) -> float:
        """Return how much of the lost room an amount accounts for; 0 where that is not known."""
        return 0.0 if n_bytes is None or not self.lost_bytes else max(0.0, n_bytes / self.lost_bytes)

    @property
    def others_bytes(self) -> int | None:
        """How much more others held at the end."""
        return subtract(self.first_other_bytes, self.last_other_bytes)


def subtract(before: int | None, after: int | None) -> int | None:
    """Return how much more the second amount is."""
    return None if before is None or after is None else after - before


class Circumstances(Struct, frozen=True, kw_only=True):
    """An end, or a stall, and what went before it in that life.

    `began_seconds` is when that life began, which may be before anything was seen of it, `seen_seconds` for how long it
    was seen, and `unseen_seconds` how long before its end it was last seen. `served` is whether it ever did, `hung` for
    how long nothing had moved, `answered` whether its page still came. `broken` is whether a process without which it
    serves nobody went before the rest, `shut_seconds` for how long its server lived on without one and refused its page
    then. `idle_seconds` is for how long nothing had run or waited when the page was last
    seen; None where something did, or that is not known. `xids` and `ooms` are of the quarter of an hour before, `lost`
    is what was said then of GPUs that could not be read.
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
    broken: bool = False
    shut_seconds: float | None = None
    engines: tuple[EngineReading, ...] = ()
    idle_seconds: float | None = None
    usual_running: float | None = None
    gpus: tuple[GpuAtEnd, ...] = ()
    xids: tuple[int, ...] = ()
    ooms: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()

    @property
    def running(self) -> float | None:
        """The requests that ran when the page was last seen."""
        return sum_known(engine.running for engine in self.engines)

    @property
    def worst(self) -> GpuAtEnd | None:
        """The GPU with the least room left."""
        known = [gpu for gpu in self.gpus if gpu.last_room_bytes is not None]
        return min(known, key=lambda gpu: gpu.last_room_bytes or 0, default=None)

    @property
    def full(self) -> GpuAtEnd | None:
        """A GPU that ran full; by the word of the daemon, which saw more, the one with the least room."""
        if self.reason is ExitReason.OUT_OF_MEMORY:
            return self.worst
        return next((gpu for gpu in self.gpus if gpu.is_full), None)


MOST_SHOWN: Final = 100
Header = Mapping[str, Any]


def find_trace(given: Path) -> Path:
    """Return the trace to look into: a file itself, of a folder its newest incident; raises BadInput."""
    if not given.is_dir():
        return given
    try:
        found = list_incidents(given / INCIDENTS) or list_incidents(given)
    except OSError as error:
        raise BadInput(f"{given}: cannot be read: {error.strerror}") from error
    if found:
        return found[-1]
    record = given / FLIGHT
    hint = f"; {record} is what was recorded last" if record.exists() else ""
    raise BadInput(f"{given}: has no incident, which is set aside when a life of the engine ends or stalls{hint}")


def read_header(file: Path) -> Header:
    """Return what is known of an incident; nothing where the file is another trace. Raises BadInput."""
    try:
        with file.open("rb") as stream:
            known = parse_known(next(read_lines(stream), b""))
    except OSError as error:
        raise BadInput(f"{file}: cannot be read: {error.strerror}") from error
    if known is None:
        return {}
    time = known.get("t")
    if (
        not isinstance(time, int | float)
        or not 0 <= time < YEAR_10000
        or str(known.get("what")) not in set(IncidentKind)
    ):
        raise BadInput(
            f"{file}: line 1: the header of an incident has a time `t`, and `what`: {' or '.join(IncidentKind)}"
        )
    return known


def find_exit_reason(known: Header) -> ExitReason | None:
    """Return the first end's reason that the daemon counted."""
    reasons = [each.get("reason") for each in (known, *read_records(known, "events"))]
    return next((reason for told in reasons for reason in ExitReason if told == reason), None)


def read_progress_age(known: Header) -> float | None:
    """Return for how long nothing had moved at a stall; what a canary waits for is in no trace."""
    age = known.get("progress_age_seconds")
    return float(age) if isinstance(age, int | float) and 0 <= age <= LARGEST else None


def read_leaks(known: Header) -> dict[str, LeakState]:
    """Return what the leak detector said of each GPU, by UUID."""
    leaks = read_records(read_before(known), "leaks")
    return {
        str(each.get("uuid")): state for each in leaks for state in LeakState if str(state) == str(each.get("state"))
    }


def read_xids(known: Header) -> tuple[int, ...]:
    """Return the XIDs shortly before the end."""
    return tuple(each["xid"] for each in read_records(known, "xids") if isinstance(each.get("xid"), int))


def read_ooms(known: Header) -> tuple[str, ...]:
    """Return the OutOfMemoryErrors that torch raised shortly before the end, by the probe."""
    return tuple(
        f"torch raised OutOfMemoryError on {each.get('uuid')}: {_format_amount(each, 'asked')}"
        f" asked, {_format_amount(each, 'free')} free"
        + ("" if each.get("reserved") is None else f", {_format_amount(each, 'reserved')} its own")
        + ("" if each.get("allocated") is None else f", {_format_amount(each, 'allocated')} in use")
        for each in read_records(known, "ooms")
    )


def read_used(known: Header) -> dict[str, list[tuple[float, int]]]:
    """Return the looks at the memory in use between samples, by UUID of a GPU, each with its time."""
    found = read_before(known).get("used")
    looks = found.items() if isinstance(found, dict) else ()
    return {uuid: [(at, n) for at, n in filter(_is_look, seen)] for uuid, seen in looks if isinstance(seen, list)}


def _is_look(value: object) -> bool:
    """Return whether it is a time, and bytes."""
    if not isinstance(value, list) or not all(type(each) in {int, float} for each in value):
        return False
    return len(value) == 2 and 0 <= value[0] < YEAR_10000 and 0 <= value[1] <= LARGEST  # noqa: PLR2004 - as said


def read_lost_gpus(known: Header) -> tuple[str, ...]:
    """Return what was said of the engine's GPUs that could not be read."""
    said = read_records(read_before(known), "verdicts")
    return tuple(str(each["sentence"]) for each in said if each.get("alert") == GPU_LOST and each.get("sentence"))


def read_sentences(known: Header) -> tuple[str, ...]:
    """Return the verdicts then."""
    return tuple(str(each["sentence"]) for each in read_records(read_before(known), "verdicts") if each.get("sentence"))


def list_holders(known: Header) -> Iterator[str]:
    """Yield who held what on the GPUs."""
    for each in read_records(read_before(known), "holders"):
        yield f"{each.get('uuid')} pid {each.get('pid')} {_format_amount(each, 'used')}"


def list_torch_memory(known: Header) -> Iterator[str]:
    """Yield what torch held on each GPU, by the probe's last files."""
    for process in read_records(read_before(known), "probe"):
        for each in read_records(process, "devices"):
            held = (
                f"{word} {_format_amount(each, f'{word}_bytes')}"
                for word in ("allocated", "reserved")
                if f"{word}_bytes" in each
            )
            yield f"{each.get('uuid')} pid {process.get('pid')} {process.get('role')}: {', '.join(held)}"


def _format_amount(found: Header, name: str) -> str:
    """Return an amount of memory in words, for the driver does not tell each."""
    n_bytes = found.get(name)
    return format_size(n_bytes) if type(n_bytes) is int and 0 <= n_bytes <= LARGEST else "an amount not known"


def read_log_lines(known: Header) -> tuple[str, ...]:
    """Return the last lines of the daemon's log."""
    lines = known.get("log")
    return tuple(map(str, lines[-MOST_SHOWN:])) if isinstance(lines, list) else ()


def read_before(known: Header) -> Header:
    """Return what was known before it."""
    found = known.get("before")
    return found if isinstance(found, dict) else {}


def read_records(known: Header, side: str) -> tuple[Header, ...]:
    """Return the objects of a list in the header."""
    found = known.get(side)
    return tuple(each for each in found[-MOST_SHOWN:] if isinstance(each, dict)) if isinstance(found, list) else ()
