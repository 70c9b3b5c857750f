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
from vllm_headroom.units import HOUR_SECONDS, MIB, to_datetime

log = Log(__name__)

FLIGHT: Final = "flight.jsonl"
"""The newer file of the record. The name of the older file has `.1` at its end."""

SPOILED: Final = f"spoiled-{FLIGHT}"
"""The name for a file of the record that is not a trace. The pattern flight.jsonl*, with which
people join the record's two files, does not match this name.
"""

INCIDENTS: Final = "incidents"
"""The folder of the incidents, beside the record."""

INCIDENT_KEY: Final = "incident"
"""The key of an incident's facts, in the header of its trace."""

INCIDENT_NAME: Final = "%Y-%m-%dT%H-%M-%SZ.jsonl"
"""The file name of an incident, by the time when the incident began. So the names sort by time."""

FLIGHT_BYTES: Final = 22 * MIB
"""The largest size of each of the record's two files. They hold a day of one GPU with a sample
every 5 s, or hours of eight GPUs with a sample every second.
"""

INCIDENT_BYTES: Final = 2 * MIB
"""The largest size of an incident's file, so that MOST_INCIDENTS fit beside the record."""

MOST_INCIDENTS: Final = 8
"""This many incidents are kept. With the record they take 60 MiB, so that a volume of 64 MiB also
holds an incident that is being written.
"""

ROOMY_BYTES: Final = 128 * MIB
"""If a volume is smaller than this, all these sizes shrink in proportion, so that record and
incidents take half of it. The volume of the Kustomize components has 16 MiB: hours of one GPU with
a sample every 5 s.
"""

INCIDENT_LEAD_SECONDS: Final = 6 * HOUR_SECONDS
"""An incident's file has this much of the record before the incident. The leak detector needs an
hour or two, and the header has a leak that was found earlier.
"""

DENSE_SECONDS: Final = 600.0
"""An incident's file has every sample of this time before the incident."""

SPARSE_SECONDS: Final = 15.0
"""Before DENSE_SECONDS, an incident's file has one sample per interval of this length. This shows
the course of memory, and takes 1.5 MiB for six hours.
"""

_SAMPLE_TIME: Final = re.compile(rb'\{"t":([0-9]+(?:[.][0-9]+)?)[,}]')
"""The start of each sample, with its time, so that the rest need not be parsed."""


def locate_incident(folder: Path, seconds: float) -> Path:
    """Return the file of an incident beside a record."""
    name = to_datetime(seconds).strftime(INCIDENT_NAME)
    return folder / INCIDENTS / name


def list_incidents(folder: Path) -> list[Path]:
    """Return the files of incidents in a folder, the newest last; raises OSError.

    Files with other names are left out, and so are pipes and devices.
    """
    incidents = [file for file in folder.glob("*.jsonl") if parse_start(file) is not None]
    return sorted(file for file in incidents if file.is_file())


def find_newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest incident beside a record, and its facts; raises OSError.

    Returns None if there is no incident with a header that can be read.
    """
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
    """Return the facts in the first line of an incident's file; None for any other line."""
    try:
        header = json.loads(first_line)
        facts = header.get(INCIDENT_KEY) if isinstance(header, dict) else None
        # Python also reads NaN and infinity, which JSON does not have. The encoder refuses them.
        encode_line({INCIDENT_KEY: facts})
    except (ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) else None


def append_to_record(folder: Path, line: bytes) -> None:
    """Append a line to the record in a folder, and create the folder if it is missing.

    If a file is not a trace, it is set aside. After a crash of the machine it may contain zeros,
    and on a bad disk anything. Raises OSError, and ValueError if the file is a link.
    """
    make_folder(folder)
    file = folder / FLIGHT
    if file.is_symlink():  # A link in the daemon's folder is an attack.
        raise ValueError(NOT_A_TRACE)
    # The share is read each time, because a volume can be resized while the daemon runs.
    max_bytes = int(find_size_share(folder) * FLIGHT_BYTES)
    try:
        append(file, line, max_bytes)
    except ValueError:
        spoiled = file.replace(file.with_name(SPOILED))
        log.warning("the flight record was no trace, and is set aside", file=str(spoiled))
        append(file, line, max_bytes)


def write_incident(folder: Path, seconds: float, facts: dict[str, Any]) -> None:
    """Create or replace the incident of that time from the current record, atomically.

    At least half of the file's size is for samples. If there are too many samples, the oldest are
    left out. If there are too many incidents, one is deleted. Raises OSError.
    """
    max_bytes = int(find_size_share(folder) * INCIDENT_BYTES)
    # The facts get at most half of the size, so that they never displace all samples.
    header = _build_header(facts, max_bytes // 2)
    samples_bytes = max(max_bytes // 2, max_bytes - len(header))
    # The samples get the space that a short header leaves.
    samples = _select_samples(_read_lines(folder), seconds, samples_bytes)
    incidents = folder / INCIDENTS
    make_folder(folder)
    make_folder(incidents)
    file = locate_incident(folder, seconds)
    replace_file(file, incidents / "unfinished", chain((header,), samples))
    _make_room(incidents, file)


def _build_header(facts: dict[str, Any], max_bytes: int) -> bytes:
    """Return the first line of an incident's file, which has the facts.

    While this line is longer than `max_bytes`, the longest field of `before` is left out. The line
    may still be longer without any of these fields. Readers read at most LONGEST_LINE_BYTES of this
    line.
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
    """Return the share of the usual sizes that the volume of a folder allows, at most 1.

    Half of a small volume is left for the state files. Raises OSError.
    """
    volume = os.statvfs(folder)
    return min(1.0, volume.f_blocks * volume.f_frsize / ROOMY_BYTES)


def _make_room(incidents: Path, newest: Path) -> None:
    """Delete incidents until there are at most MOST_INCIDENTS; `newest` is never deleted.

    The incident that followed the previous one soonest is deleted first, so that the first exits of
    a crash loop stay.
    """
    starts_seconds = {file: parse_start(file) or 0.0 for file in list_incidents(incidents)}
    while len(starts_seconds) > MOST_INCIDENTS:
        gaps = [
            (starts_seconds[file] - starts_seconds[previous_file], file)
            for previous_file, file in pairwise(starts_seconds)
            if file != newest
        ]
        # In a crash loop this leaves fewer of the later exits.
        _, closest_file = min(gaps)
        closest_file.unlink(missing_ok=True)
        del starts_seconds[closest_file]


def _read_lines(folder: Path) -> Iterator[bytes]:
    """Yield the lines of the record, those of the older file first; raises OSError.

    A line that is too long is yielded in parts. If a pipe or device is in place of a file, it is
    skipped.
    """
    for file in (folder / f"{FLIGHT}.1", folder / FLIGHT):
        if file.is_file():
            with file.open("rb") as stream:
                yield from iter(partial(stream.readline, LONGEST_LINE_BYTES), b"")


def _select_samples(lines: Iterable[bytes], seconds: float, max_bytes: int) -> Iterable[bytes]:
    """Return the lines of the samples from INCIDENT_LEAD_SECONDS before a time on.

    Before the last DENSE_SECONDS, one sample is taken for each SPARSE_SECONDS. If the samples
    exceed `max_bytes`, the oldest are left out.
    """
    samples: deque[bytes] = deque()
    samples_bytes = 0
    previous_slot = -1
    for line in lines:
        sample_seconds = _parse_sample_time(line)
        if sample_seconds is None or sample_seconds < seconds - INCIDENT_LEAD_SECONDS:
            continue
        # The first sample of each slot is kept. Of the last minutes, every sample is kept.
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
    """Return the time of a sample; None for any other line, and for a line without its end."""
    match = _SAMPLE_TIME.match(line)
    if match is None or not line.endswith(b"\n"):
        return None
    return float(match[1])
