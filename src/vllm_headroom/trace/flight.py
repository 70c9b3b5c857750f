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
from vllm_headroom.units import HOUR_SECONDS, MIB

log = Log(__name__)

FLIGHT: Final = "flight.jsonl"
"""The file of the record; the older of the two files has `.1` at its end."""

SPOILED: Final = f"spoiled-{FLIGHT}"
"""Not matched by FLIGHT*, by which people put the record together."""

INCIDENTS: Final = "incidents"
"""The folder of the incidents, beside the record."""

INCIDENT_KEY: Final = "incident"
"""The key of an incident's facts, in the header of its trace."""

INCIDENT_NAME: Final = "%Y-%m-%dT%H-%M-%SZ.jsonl"
"""Names sort by time."""

FLIGHT_BYTES: Final = 22 * MIB
"""Of each of two files, the older of which is replaced: a day of one GPU at 5 s, hours of eight at
1 s."""

INCIDENT_BYTES: Final = 2 * MIB
"""Of each incident, so that MOST_INCIDENTS fit beside the record."""

MOST_INCIDENTS: Final = 8
"""With the record 60 MiB, so that a volume of 64 also holds an incident that is being written."""

ROOMY_BYTES: Final = 128 * MIB
"""A volume of which all of it takes half. The components' volume has 16 MiB: hours of one GPU at
5 s."""

INCIDENT_LEAD_SECONDS: Final = 6 * HOUR_SECONDS
"""How much of the record before an incident its file has: the leak detector needs an hour or two,
and a leak that it found earlier is in the header."""

DENSE_SECONDS: Final = 600.0
"""Of the last ten minutes before an incident, every sample stays."""

SPARSE_SECONDS: Final = 15.0
"""Before that, a sample in 15 s shows the course of memory: 1.5 MiB in six hours."""

_SAMPLE_TIME: Final = re.compile(rb'\{"t":([0-9]+(?:[.][0-9]+)?)[,}]')
"""The start of each sample: its time without parsing the rest."""


def locate_incident(folder: Path, seconds: float) -> Path:
    """Return the file of an incident beside a record."""
    name = datetime.fromtimestamp(seconds, UTC).strftime(INCIDENT_NAME)
    return folder / INCIDENTS / name


def list_incidents(folder: Path) -> list[Path]:
    """Return the incidents of a folder, the newest last, without pipes or devices.

    Raises OSError.
    """
    incidents = [file for file in folder.glob("*.jsonl") if parse_start(file) is not None]
    return sorted(file for file in incidents if file.is_file())


def find_newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest incident beside a record, and its facts; raises OSError."""
    for file in reversed(list_incidents(folder / INCIDENTS)):
        with file.open("rb") as stream:
            facts = parse_incident_facts(stream.readline(LONGEST_LINE_BYTES))
        if facts is not None and _is_time(facts.get("t")):
            return file, facts
    return None


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < YEAR_10000


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
        facts = header.get(INCIDENT_KEY) if isinstance(header, dict) else None
        # Python also reads numbers that JSON has not, which the encoder refuses
        encode_line({INCIDENT_KEY: facts})
    except (ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) else None


def append_to_record(folder: Path, line: bytes) -> None:
    """Append a line to the record; raises OSError, and ValueError where a link is in its place.

    A file that is no trace is set aside: a crash of the machine leaves zeros, and a bad disk
    anything.
    """
    make_folder(folder)
    file = folder / FLIGHT
    if file.is_symlink():  # a link in the daemon's folder is an attack
        raise ValueError(NOT_A_TRACE)
    max_bytes = int(find_size_share(folder) * FLIGHT_BYTES)
    try:
        append(file, line, max_bytes)
    except ValueError:
        spoiled = file.replace(file.with_name(SPOILED))
        log.warning("the flight record was no trace, and is set aside", file=str(spoiled))
        append(file, line, max_bytes)


def write_incident(folder: Path, seconds: float, facts: dict[str, Any]) -> None:
    """Create or replace the incident of that time from the current record, atomically.

    At least half of its size is for samples; where there are too many, the oldest are left out.
    Raises OSError.
    """
    max_bytes = int(find_size_share(folder) * INCIDENT_BYTES)
    header = _build_header(facts, max_bytes // 2)
    samples_bytes = max(max_bytes // 2, max_bytes - len(header))
    samples = _select_samples(_read_lines(folder), seconds, samples_bytes)
    incidents = folder / INCIDENTS
    make_folder(folder)
    make_folder(incidents)
    file = locate_incident(folder, seconds)
    replace_file(file, incidents / "unfinished", chain((header,), samples))
    _make_room(incidents, file)


def _build_header(facts: dict[str, Any], max_bytes: int) -> bytes:
    """Return the first line, which readers take up to LONGEST_LINE_BYTES.

    Where it is too long, the longest fields of `before` are left out.
    """
    before_fields = dict(facts.get("before", {}))
    while True:
        header = encode_line({**HEADER, INCIDENT_KEY: {**facts, "before": before_fields}})
        if len(header) <= max_bytes or not before_fields:
            return header
        sizes_bytes = {name: len(encode_line(value)) for name, value in before_fields.items()}
        longest = max(sizes_bytes, key=sizes_bytes.__getitem__)
        del before_fields[longest]


def find_size_share(folder: Path) -> float:
    """Return the share of the usual sizes that the volume of a folder allows.

    Half of a small volume is left for the state.
    """
    volume = os.statvfs(folder)
    return min(1.0, volume.f_blocks * volume.f_frsize / ROOMY_BYTES)


def _make_room(incidents: Path, newest: Path) -> None:
    """Delete the incidents that came soonest after another: of repeated exits the first stay."""
    starts_seconds = {file: parse_start(file) or 0.0 for file in list_incidents(incidents)}
    while len(starts_seconds) > MOST_INCIDENTS:
        gaps = [
            (starts_seconds[file] - starts_seconds[previous_file], file)
            for previous_file, file in pairwise(starts_seconds)
            if file != newest
        ]
        _, closest_file = min(gaps)
        closest_file.unlink(missing_ok=True)
        del starts_seconds[closest_file]


def _read_lines(folder: Path) -> Iterator[bytes]:
    """Yield the lines of the record, the older file first.

    Of any other content it yields parts of bounded length. No pipe or device is opened.
    """
    for file in (folder / f"{FLIGHT}.1", folder / FLIGHT):
        if file.is_file():
            with file.open("rb") as stream:
                yield from iter(partial(stream.readline, LONGEST_LINE_BYTES), b"")


def _select_samples(lines: Iterable[bytes], seconds: float, max_bytes: int) -> Iterable[bytes]:
    """Return the samples from INCIDENT_LEAD_SECONDS before a time on, thinned out.

    Where they take more than `max_bytes`, the oldest are left out.
    """
    samples: deque[bytes] = deque()
    samples_bytes = 0
    previous_slot = -1
    for line in lines:
        sample_seconds = _parse_sample_time(line)
        if sample_seconds is None or sample_seconds < seconds - INCIDENT_LEAD_SECONDS:
            continue
        slot = int(sample_seconds // SPARSE_SECONDS)
        is_repeated = slot == previous_slot
        previous_slot = slot
        if is_repeated and sample_seconds < seconds - DENSE_SECONDS:
            continue
        samples.append(line)
        samples_bytes += len(line)
        while samples_bytes > max_bytes:
            samples_bytes -= len(samples.popleft())
    return samples


def _parse_sample_time(line: bytes) -> float | None:
    """Return the time of a sample; None for any other line, and for one without an end."""
    match = _SAMPLE_TIME.match(line)
    if match is None or not line.endswith(b"\n"):
        return None
    return float(match[1])
