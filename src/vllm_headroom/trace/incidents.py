"""The incidents that lie beside a flight record: their files, and what their headers say."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from vllm_headroom.trace.entries import line
from vllm_headroom.trace.parse import LONGEST_LINE, YEAR_10000

FLIGHT: Final = "flight.jsonl"
INCIDENTS: Final = "incidents"
INCIDENT: Final = "incident"
"""The key of what is known of an incident, in the header of its trace."""


class What(StrEnum):
    """What happened, as the header has it."""

    ENDED = "ended"
    STALLED = "stalled"


def name_of(seconds: float) -> str:
    """Return the name of the file of an incident, by which they can be sorted."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H-%M-%SZ}.jsonl"


def incidents_in(folder: Path) -> list[Path]:
    """Return the incidents of a folder, the newest last; raises OSError. A pipe or a device is none."""
    return sorted(file for file in folder.glob("*.jsonl") if began(file) is not None and file.is_file())


def newest_in(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest incident that lies beside a record, and what is known of it; raises OSError."""
    for file in reversed(incidents_in(folder / INCIDENTS)):
        with file.open("rb") as stream:
            known = known_of(stream.readline(LONGEST_LINE))
        if known is not None and isinstance(known.get("t"), int | float) and 0 <= known["t"] < YEAR_10000:
            return file, known
    return None


def began(file: Path) -> float | None:
    """Return the time of an incident by the name of its file; None of what is none."""
    try:
        return datetime.strptime(file.name, "%Y-%m-%dT%H-%M-%SZ.jsonl").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def known_of(first_line: bytes) -> dict[str, Any] | None:
    """Return what the header of an incident says is known of it; None where the line is another's, or no JSON."""
    try:
        header = json.loads(first_line)
        known = header.get(INCIDENT) if isinstance(header, dict) else None
        line({INCIDENT: known})  # Python also reads numbers that JSON has not
    except (ValueError, RecursionError):
        return None
    return known if isinstance(known, dict) else None
