"""The header of an incident: what the daemon knew, read strictly, for a file may come from anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from vllm_headroom.derive.verdicts import GPU_LOST
from vllm_headroom.parse.fields import LARGEST
from vllm_headroom.trace.errors import BadInput
from vllm_headroom.trace.incidents import FLIGHT, INCIDENTS, What, incidents_in, known_of
from vllm_headroom.trace.parse import YEAR_10000, lines_of
from vllm_headroom.units import size
from vllm_headroom.vocabulary import ExitReason, LeakState

MOST_SHOWN: Final = 100
Known = Mapping[str, Any]


def trace_of(given: Path) -> Path:
    """Return the trace to look into: a file itself, of a folder its newest incident; raises BadInput."""
    if not given.is_dir():
        return given
    try:
        found = incidents_in(given / INCIDENTS) or incidents_in(given)
    except OSError as error:
        raise BadInput(f"{given}: cannot be read: {error.strerror}") from error
    if found:
        return found[-1]
    record = given / FLIGHT
    hint = f"; {record} is what was recorded last" if record.exists() else ""
    raise BadInput(f"{given}: has no incident, which is set aside when a life of the engine ends or stalls{hint}")


def header_of(file: Path) -> Known:
    """Return what is known of an incident; nothing where the file is another trace. Raises BadInput."""
    try:
        with file.open("rb") as stream:
            known = known_of(next(lines_of(stream), b""))
    except OSError as error:
        raise BadInput(f"{file}: cannot be read: {error.strerror}") from error
    if known is None:
        return {}
    time = known.get("t")
    if not isinstance(time, int | float) or not 0 <= time < YEAR_10000 or str(known.get("what")) not in set(What):
        raise BadInput(f"{file}: line 1: the header of an incident has a time `t`, and `what`: {' or '.join(What)}")
    return known


def exit_reason(known: Known) -> ExitReason | None:
    """Return the first end's reason that the daemon counted."""
    reasons = [each.get("reason") for each in (known, *records(known, "events"))]
    return next((reason for told in reasons for reason in ExitReason if told == reason), None)


def header_age(known: Known) -> float | None:
    """Return for how long nothing had moved at a stall; what a canary waits for is in no trace."""
    age = known.get("progress_age_seconds")
    return float(age) if isinstance(age, int | float) and 0 <= age <= LARGEST else None


def header_leaks(known: Known) -> dict[str, LeakState]:
    """Return what the leak detector said of each GPU, by UUID."""
    leaks = records(before(known), "leaks")
    return {
        str(each.get("uuid")): state for each in leaks for state in LeakState if str(state) == str(each.get("state"))
    }


def header_xids(known: Known) -> tuple[int, ...]:
    """Return the XIDs shortly before the end."""
    return tuple(each["xid"] for each in records(known, "xids") if isinstance(each.get("xid"), int))


def header_ooms(known: Known) -> tuple[str, ...]:
    """Return the OutOfMemoryErrors that torch raised shortly before the end, by the probe."""
    return tuple(
        f"torch raised OutOfMemoryError on {each.get('uuid')}: {_told(each, 'asked')} asked, {_told(each, 'free')} free"
        + ("" if each.get("reserved") is None else f", {_told(each, 'reserved')} its own")
        + ("" if each.get("allocated") is None else f", {_told(each, 'allocated')} in use")
        for each in records(known, "ooms")
    )


def header_used(known: Known) -> dict[str, list[tuple[float, int]]]:
    """Return the looks at the memory in use between samples, by UUID of a GPU, each with its time."""
    found = before(known).get("used")
    looks = found.items() if isinstance(found, dict) else ()
    return {uuid: [(at, n) for at, n in filter(_is_look, seen)] for uuid, seen in looks if isinstance(seen, list)}


def _is_look(value: object) -> bool:
    """Return whether it is a time, and bytes."""
    if not isinstance(value, list) or not all(type(each) in {int, float} for each in value):
        return False
    return len(value) == 2 and 0 <= value[0] < YEAR_10000 and 0 <= value[1] <= LARGEST  # noqa: PLR2004 - as said


def header_lost(known: Known) -> tuple[str, ...]:
    """Return what was said of the engine's GPUs that could not be read."""
    said = records(before(known), "verdicts")
    return tuple(str(each["sentence"]) for each in said if each.get("alert") == GPU_LOST and each.get("sentence"))


def sentences(known: Known) -> tuple[str, ...]:
    """Return the verdicts then."""
    return tuple(str(each["sentence"]) for each in records(before(known), "verdicts") if each.get("sentence"))


def holders(known: Known) -> Iterator[str]:
    """Yield who held what on the GPUs."""
    for each in records(before(known), "holders"):
        yield f"{each.get('uuid')} pid {each.get('pid')} {_told(each, 'used')}"


def probed(known: Known) -> Iterator[str]:
    """Yield what torch held on each GPU, by the probe's last files."""
    for process in records(before(known), "probe"):
        for each in records(process, "devices"):
            held = (
                f"{word} {_told(each, f'{word}_bytes')}"
                for word in ("allocated", "reserved")
                if f"{word}_bytes" in each
            )
            yield f"{each.get('uuid')} pid {process.get('pid')} {process.get('role')}: {', '.join(held)}"


def _told(found: Known, name: str) -> str:
    """Return an amount of memory in words, for the driver does not tell each."""
    n_bytes = found.get(name)
    return size(n_bytes) if type(n_bytes) is int and 0 <= n_bytes <= LARGEST else "an amount not known"


def log_lines(known: Known) -> tuple[str, ...]:
    """Return the last lines of the daemon's log."""
    lines = known.get("log")
    return tuple(map(str, lines[-MOST_SHOWN:])) if isinstance(lines, list) else ()


def before(known: Known) -> Known:
    """Return what was known before it."""
    found = known.get("before")
    return found if isinstance(found, dict) else {}


def records(known: Known, side: str) -> tuple[Known, ...]:
    """Return the objects of a list in the header."""
    found = known.get(side)
    return tuple(each for each in found[-MOST_SHOWN:] if isinstance(each, dict)) if isinstance(found, list) else ()
