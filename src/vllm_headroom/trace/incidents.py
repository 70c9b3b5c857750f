"""The incidents beside a flight record: their files and headers."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from vllm_headroom.trace.entries import encode_line
from vllm_headroom.trace.parse import LONGEST_LINE, YEAR_10000

FLIGHT: Final = "flight.jsonl"
INCIDENTS: Final = "incidents"
INCIDENT: Final = "incident"
"""The key of an incident's facts, in the header of its trace."""


class IncidentKind(StrEnum):
    """What happened."""

    ENDED = "ended"
    STALLED = "stalled"


def name_incident(seconds: float) -> str:
    """Return the file name of an incident; names sort by time."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H-%M-%SZ}.jsonl"


def list_incidents(folder: Path) -> list[Path]:
    """Return the incidents of a folder, the newest last, without pipes or devices; raises OSError."""
    return sorted(file for file in folder.glob("*.jsonl") if parse_start(file) is not None and file.is_file())


def find_newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest incident beside a record, and its facts; raises OSError."""
    for file in reversed(list_incidents(folder / INCIDENTS)):
        with file.open("rb") as stream:
            known = parse_known(stream.readline(LONGEST_LINE))
        if known is not None and isinstance(known.get("t"), int | float) and 0 <= known["t"] < YEAR_10000:
            return file, known
    return None


def parse_start(file: Path) -> float | None:
    """Return the time of an incident by its file name; None for other files."""
    try:
        return datetime.strptime(file.name, "%Y-%m-%dT%H-%M-%SZ.jsonl").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def parse_known(first_line: bytes) -> dict[str, Any] | None:
    """Return the facts in the header of an incident; None for any other line."""
    try:
        header = json.loads(first_line)
        known = header.get(INCIDENT) if isinstance(header, dict) else None
        encode_line({INCIDENT: known})  # Python also reads numbers that JSON has not
    except (ValueError, RecursionError):
        return None
    return known if isinstance(known, dict) else None
