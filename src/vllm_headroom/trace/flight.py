"""The flight record on disk: the last hours as a trace of two files, and its incidents."""

import json
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Final

from vllm_headroom.log import Log
from vllm_headroom.trace.entries import HEADER, LONGEST_LINE_BYTES, YEAR_10000, encode_line
from vllm_headroom.trace.recorder import NOT_A_TRACE, append, make_folder, replace_file
from vllm_headroom.units import MIB

log = Log(__name__)

FLIGHT: Final = "flight.jsonl"
SPOILED: Final = f"spoiled-{FLIGHT}"
"""Not matched by FLIGHT*, by which people put the record together."""

INCIDENTS: Final = "incidents"
INCIDENT_KEY: Final = "incident"
"""The key of an incident's facts, in the header of its trace."""


FLIGHT_BYTES: Final = 22 * MIB
"""Of each of two files, the older of which is replaced: a day of one GPU at 5 s, hours of eight at 1 s."""

INCIDENT_BYTES: Final = 2 * MIB
MOST_INCIDENTS: Final = 8
"""With the record 60 MiB, so that a volume of 64 also holds an incident that is being written."""

ROOMY_BYTES: Final = 128 * MIB
"""A volume of which all of it takes half. The components' volume has 16 MiB: hours of one GPU at 5 s."""

BEFORE_SECONDS: Final = 6 * 3600.0
"""The leak detector needs an hour or two; a leak that it found earlier is in the header."""

CLOSE_SECONDS: Final = 600.0
SPARSE_SECONDS: Final = 15.0
"""Before the last ten minutes, a sample in 15 s shows the course of memory: 1.5 MiB in six hours."""

_TIME: Final = re.compile(rb'\{"t":([0-9]+(?:[.][0-9]+)?)[,}]')
"""The start of each sample: its time without parsing the rest."""


INCIDENT_NAME: Final = "%Y-%m-%dT%H-%M-%SZ.jsonl"
"""Names sort by time."""


def locate_incident(folder: Path, seconds: float) -> Path:
    """Return the file of an incident beside a record."""
    return folder / INCIDENTS / datetime.fromtimestamp(seconds, UTC).strftime(INCIDENT_NAME)


def list_incidents(folder: Path) -> list[Path]:
    """Return the incidents of a folder, the newest last, without pipes or devices; raises OSError."""
    return sorted(
        file for file in folder.glob("*.jsonl") if parse_start(file) is not None and file.is_file()
    )


def find_newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest incident beside a record, and its facts; raises OSError."""
    for file in reversed(list_incidents(folder / INCIDENTS)):
        with file.open("rb") as stream:
            known = parse_incident_facts(stream.readline(LONGEST_LINE_BYTES))
        if (
            known is not None
            and isinstance(known.get("t"), int | float)
            and 0 <= known["t"] < YEAR_10000
        ):
            return file, known
    return None


def parse_start(file: Path) -> float | None:
    """Return the time of an incident by its file name; None for other files."""
    try:
        return datetime.strptime(file.name, INCIDENT_NAME).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def parse_incident_facts(first_line: bytes) -> dict[str, Any] | None:
    """Return the facts in the header of an incident; None for any other line."""
    try:
        header = json.loads(first_line)
        known = header.get(INCIDENT_KEY) if isinstance(header, dict) else None
        encode_line({INCIDENT_KEY: known})  # Python also reads numbers that JSON has not
    except (ValueError, RecursionError):
        return None
    return known if isinstance(known, dict) else None


def append_to_record(folder: Path, written: bytes) -> None:
    """Add a line to the record; raises OSError, and ValueError where a link is in its place.

    A file that is no trace is set aside: a crash of the machine leaves zeros, and a bad disk anything.
    """
    make_folder(folder)
    file = folder / FLIGHT
    if file.is_symlink():  # a link in the daemon's folder is an attack
        raise ValueError(NOT_A_TRACE)
    most_bytes = int(find_size_share(folder) * FLIGHT_BYTES)
    try:
        append(file, written, most_bytes)
    except ValueError:
        spoiled = file.replace(file.with_name(SPOILED))
        log.warning("the flight record was no trace, and is set aside", file=str(spoiled))
        append(file, written, most_bytes)


def write_incident(folder: Path, seconds: float, known: dict[str, Any]) -> None:
    """Create or replace the incident of that time from the current record, atomically; raises OSError.

    At least half of its size is for samples; where there are too many, the oldest are left out.
    """
    most_bytes, incidents = int(find_size_share(folder) * INCIDENT_BYTES), folder / INCIDENTS
    header = _build_header(known, most_bytes // 2)
    samples = _select_samples(
        _read_lines(folder), seconds, max(most_bytes // 2, most_bytes - len(header))
    )
    make_folder(folder)
    make_folder(incidents)
    file = locate_incident(folder, seconds)
    replace_file(file, incidents / "unfinished", chain((header,), samples))
    _make_room(incidents, file)


def _build_header(known: dict[str, Any], most_bytes: int) -> bytes:
    """Return the first line, which readers take up to LONGEST_LINE_BYTES, without the longest fields of `before`."""
    before = dict(known.get("before", {}))
    while (
        len(header := encode_line({**HEADER, INCIDENT_KEY: {**known, "before": before}}))
        > most_bytes
        and before
    ):
        del before[max(before, key=lambda name: len(encode_line(before[name])))]
    return header


def find_size_share(folder: Path) -> float:
    """Return the share of the usual sizes to use, so that half of a small volume is left for the state."""
    volume = os.statvfs(folder)
    return min(1.0, volume.f_blocks * volume.f_frsize / ROOMY_BYTES)


def _make_room(incidents: Path, newest: Path) -> None:
    """Delete the incidents that came soonest after another: of repeated exits the first ones stay."""
    found = {file: parse_start(file) or 0.0 for file in list_incidents(incidents)}
    while len(found) > MOST_INCIDENTS:
        _, given_up = min(
            (found[file] - found[before], file)
            for before, file in pairwise(found)
            if file != newest
        )
        given_up.unlink(missing_ok=True)
        del found[given_up]


def _read_lines(folder: Path) -> Iterator[bytes]:
    """Yield the lines of the record, of any other content parts of bounded length; no pipe or device is opened."""
    for file in (folder / f"{FLIGHT}.1", folder / FLIGHT):
        if file.is_file():
            with file.open("rb") as stream:
                yield from iter(partial(stream.readline, LONGEST_LINE_BYTES), b"")


def _select_samples(lines: Iterable[bytes], seconds: float, most_bytes: int) -> Iterable[bytes]:
    """Return the samples from BEFORE_SECONDS before a time on, thinned out, without the oldest beyond `most_bytes`."""
    kept: deque[bytes] = deque()
    size, slot = 0, -1
    for each in lines:
        found = _TIME.match(each)
        time = float(found[1]) if found is not None and each.endswith(b"\n") else None
        if time is None or time < seconds - BEFORE_SECONDS:
            continue
        before, slot = slot, int(time // SPARSE_SECONDS)
        if time < seconds - CLOSE_SECONDS and slot == before:
            continue
        kept.append(each)
        size += len(each)
        while size > most_bytes:
            size -= len(kept.popleft())
    return kept
