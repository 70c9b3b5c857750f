"""The flight record on disk: a trace of recent hours, and incident files."""

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
"""The name of the record's newer file. The older file has the suffix `.1`."""

SPOILED: Final = f"spoiled-{FLIGHT}"
"""The name given to a record file that is not a trace. People join the record's two files with the
pattern flight.jsonl*. The pattern does not match this name.
"""

INCIDENTS: Final = "incidents"
"""The folder that contains the incidents, next to the record."""

INCIDENT_KEY: Final = "incident"
"""The key of an incident's facts in the header of its trace."""

INCIDENT_NAME: Final = "%Y-%m-%dT%H-%M-%SZ.jsonl"
"""The file name of an incident: its begin, in a form that sorts by time."""

FLIGHT_BYTES: Final = 22 * MIB
"""The maximum size of each of the record's two files. With one GPU sampled every 5 s, they hold a
day. With eight GPUs sampled every second, they hold hours.
"""

INCIDENT_BYTES: Final = 2 * MIB
"""The maximum size of an incident's file. MOST_INCIDENTS of these files fit next to the record."""

MOST_INCIDENTS: Final = 8
"""The number of incidents kept. Together with the record, they take 60 MiB. On a 64 MiB volume,
this leaves room for an incident that is being written.
"""

ROOMY_BYTES: Final = 128 * MIB
"""On a volume smaller than this, the maximum sizes of all files shrink proportionally. On such a
volume, the record and the incidents take half of the space. The volume in the Kustomize components
has 16 MiB, which is enough for hours of one GPU, sampled every 5 s.
"""

INCIDENT_LEAD_SECONDS: Final = 6 * HOUR_SECONDS
"""An incident's file covers this length of time before the incident. The leak detector needs an
hour or two of samples. A leak found earlier is in the header.
"""

DENSE_SECONDS: Final = 600.0
"""For this long before an incident, the incident's file contains every sample."""

SPARSE_SECONDS: Final = 15.0
"""Before the last DENSE_SECONDS, an incident's file contains one sample per interval of this
length. These samples show how memory developed, and take 1.5 MiB for six hours.
"""

_SAMPLE_TIME: Final = re.compile(rb'\{"t":([0-9]+(?:[.][0-9]+)?)[,}]')
"""Matches the start of a sample, which contains its time. The rest of the sample need not be
parsed.
"""


def locate_incident(folder: Path, seconds: float) -> Path:
    """Return the path of an incident's file in a record's folder."""
    name = to_datetime(seconds).strftime(INCIDENT_NAME)
    return folder / INCIDENTS / name


def list_incidents(folder: Path) -> list[Path]:
    """Return the incident files in a folder, newest last.

    Files with other names, pipes and devices are omitted. Raises OSError if the folder cannot be
    read.
    """
    incidents = [file for file in folder.glob("*.jsonl") if parse_start(file) is not None]
    return sorted(file for file in incidents if file.is_file())


def find_newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest incident in a record's folder, and its facts.

    Returns None if there is no incident with a readable header. Raises OSError if a file cannot be
    read.
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
    """Return the time of an incident from its file name.

    Returns None for any other name.
    """
    try:
        return datetime.strptime(file.name, INCIDENT_NAME).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def parse_incident_facts(first_line: bytes) -> dict[str, Any] | None:
    """Return the facts in the first line of an incident's file.

    Returns None for any other line.
    """
    try:
        header = json.loads(first_line)
        facts = header.get(INCIDENT_KEY) if isinstance(header, dict) else None
        # Python also accepts NaN and infinity, which JSON does not have. The encoder rejects them.
        encode_line({INCIDENT_KEY: facts})
    except (ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) else None


def append_to_record(folder: Path, line: bytes) -> None:
    """Append a line to the record in a folder, creating the folder if needed.

    A file that is not a trace is renamed. After a machine crash, for example, a file may contain
    NUL bytes. Raises OSError if writing fails, and ValueError if the file is a link.
    """
    make_folder(folder)
    file = folder / FLIGHT
    if file.is_symlink():  # A link in the daemon's folder indicates an attack.
        raise ValueError(NOT_A_TRACE)
    # The share is computed each time. A volume can be resized while the daemon is running.
    max_bytes = int(find_size_share(folder) * FLIGHT_BYTES)
    try:
        append(file, line, max_bytes)
    except ValueError:
        spoiled = file.replace(file.with_name(SPOILED))
        log.warning("the flight record was no trace, and is set aside", file=str(spoiled))
        append(file, line, max_bytes)


def write_incident(folder: Path, seconds: float, facts: dict[str, Any]) -> None:
    """Write or replace the incident file for a time, atomically, from the current record.

    At least half of the file's maximum size is reserved for samples. If the samples need more space
    than remains, the oldest samples are omitted. If the folder has too many incidents after the
    writing, one incident is deleted. Raises OSError if reading or writing fails.
    """
    max_bytes = int(find_size_share(folder) * INCIDENT_BYTES)
    # The facts get at most half of the size. The facts therefore never displace all samples.
    header = _build_header(facts, max_bytes // 2)
    samples_bytes = max(max_bytes // 2, max_bytes - len(header))
    # The samples also get any space left over by a short header.
    samples = _select_samples(_read_lines(folder), seconds, samples_bytes)
    incidents = folder / INCIDENTS
    make_folder(folder)
    make_folder(incidents)
    file = locate_incident(folder, seconds)
    replace_file(file, incidents / "unfinished", chain((header,), samples))
    _make_room(incidents, file)


def _build_header(facts: dict[str, Any], max_bytes: int) -> bytes:
    """Return the first line of an incident's file, which contains the facts.

    If the line is longer than `max_bytes`, fields of `before` are omitted, longest first. Even
    without these fields, the line may be too long. Programs that read the line stop after
    LONGEST_LINE_BYTES.
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
    """Return the share of the usual file sizes that fits on a folder's volume.

    The share is at most 1. Half of a small volume is left for the state files. Raises OSError if
    the volume cannot be examined.
    """
    volume = os.statvfs(folder)
    return min(1.0, volume.f_blocks * volume.f_frsize / ROOMY_BYTES)


def _make_room(incidents: Path, newest: Path) -> None:
    """Delete incidents until there are at most MOST_INCIDENTS; `newest` is never deleted.

    The first incident to be deleted is the one that followed its predecessor most closely. The
    first exits of a crash loop are thus kept.
    """
    starts_seconds = {file: parse_start(file) or 0.0 for file in list_incidents(incidents)}
    while len(starts_seconds) > MOST_INCIDENTS:
        gaps = [
            (starts_seconds[file] - starts_seconds[previous_file], file)
            for previous_file, file in pairwise(starts_seconds)
            if file != newest
        ]
        # In a crash loop, this removes some of the later exits.
        _, closest_file = min(gaps)
        closest_file.unlink(missing_ok=True)
        del starts_seconds[closest_file]


def _read_lines(folder: Path) -> Iterator[bytes]:
    """Yield the lines of the record, starting with the older file.

    A line that is too long is yielded in parts. A pipe or device in place of a file is skipped.
    Raises OSError if a file cannot be read.
    """
    for file in (folder / f"{FLIGHT}.1", folder / FLIGHT):
        if file.is_file():
            with file.open("rb") as stream:
                yield from iter(partial(stream.readline, LONGEST_LINE_BYTES), b"")


def _select_samples(lines: Iterable[bytes], seconds: float, max_bytes: int) -> Iterable[bytes]:
    """Return the lines of the samples taken since INCIDENT_LEAD_SECONDS before a time.

    Every sample of the last DENSE_SECONDS is selected, but earlier only one per SPARSE_SECONDS. If
    the samples exceed `max_bytes`, the oldest samples are omitted.
    """
    samples: deque[bytes] = deque()
    samples_bytes = 0
    previous_slot = -1
    for line in lines:
        sample_seconds = _parse_sample_time(line)
        if sample_seconds is None or sample_seconds < seconds - INCIDENT_LEAD_SECONDS:
            continue
        # In the last minutes before the incident, every sample is kept. Earlier, only the first
        # sample in each slot is kept.
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
    """Return the time of a sample.

    Returns None if the line is incomplete or not a sample.
    """
    match = _SAMPLE_TIME.match(line)
    if match is None or not line.endswith(b"\n"):
        return None
    return float(match[1])
