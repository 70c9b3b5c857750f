"""The flight record on disk: the last hours as a trace of two files, and beside it what was set aside of it."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Final

from vllm_headroom.log import Log
from vllm_headroom.trace.entries import HEADER, encode_line
from vllm_headroom.trace.incidents import FLIGHT, INCIDENT, INCIDENTS, list_incidents, name_incident, parse_start
from vllm_headroom.trace.parse import LONGEST_LINE
from vllm_headroom.trace.recorder import FOREIGN, append, make_folder, replace_file
from vllm_headroom.units import MIB

log = Log(__name__)

FLIGHT_BYTES: Final = 22 * MIB
"""Of each of two files, the older of which makes room for a new one: a day of one GPU at 5 s, hours of eight at 1 s."""

INCIDENT_BYTES: Final = 2 * MIB
MOST_INCIDENTS: Final = 8
"""With the record itself 60 MiB, so that a volume of 64 holds it, and one incident that is just being written."""

ROOMY_BYTES: Final = 128 * MIB
"""A volume on which all of it takes half. The components' own has 16 MiB: hours of one GPU at 5 s all the same."""

BEFORE_SECONDS: Final = 6 * 3600.0
"""The leak detector takes an hour or two to be sure; a leak that it found earlier is in the header."""

CLOSE_SECONDS: Final = 600.0
SPARSE_SECONDS: Final = 15.0
"""Of what is longer ago than the last ten minutes, a sample in 15 s says how memory went: 1.5 MiB in six hours."""

_TIME: Final = re.compile(rb'\{"t":([0-9]+(?:[.][0-9]+)?)[,}]')
"""How `write` begins each sample: its time without the cost of the rest."""


def keep(folder: Path, written: bytes) -> None:
    """Add a line to the record; raises OSError, and ValueError where another file is in its place.

    One that begins with zeros is what a crash of the machine left of the record: it is set aside, over an older one.
    """
    make_folder(folder)
    file = folder / FLIGHT
    if file.is_symlink():  # nobody who means well puts one into a folder that is the daemon's alone
        raise ValueError(FOREIGN)
    most_bytes = int(find_share(folder) * FLIGHT_BYTES)
    try:
        append(file, written, most_bytes)
    except ValueError:
        spoiled = file.with_name(f"{FLIGHT}.spoiled")
        if not file.is_file() or not _begins_with_zeros(file):
            raise
        file.replace(spoiled)
        log.warning("the flight record was spoiled by a crash and is set aside", file=str(spoiled))
        append(file, written, most_bytes)


def _begins_with_zeros(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(1) == b"\0"


def set_aside(folder: Path, seconds: float, known: dict[str, Any]) -> None:
    """Make the incident of that time from the record as it is now, in place of one of the same time; raises OSError.

    The file is there as a whole or not at all. The oldest samples are left out where there are too many; half of the
    room is theirs.
    """
    most_bytes, incidents = int(find_share(folder) * INCIDENT_BYTES), folder / INCIDENTS
    header = _build_header(known, most_bytes // 2)
    samples = _select_samples(_read_lines(folder), seconds, max(most_bytes // 2, most_bytes - len(header)))
    make_folder(folder)
    make_folder(incidents)
    file = incidents / name_incident(seconds)
    replace_file(file, incidents / "unfinished", chain((header,), samples))
    _make_room(incidents, file)


def _build_header(known: dict[str, Any], most_bytes: int) -> bytes:
    """Return the first line; where it would be too long, the longest of what was known before goes first.

    What the probe's files say is as long as the engine's container likes, and readers take a line of LONGEST_LINE.
    """
    before = dict(known.get("before", {}))
    while len(header := encode_line({**HEADER, INCIDENT: {**known, "before": before}})) > most_bytes and before:
        del before[max(before, key=lambda name: len(encode_line(before[name])))]
    return header


def find_share(folder: Path) -> float:
    """Return how much of the usual sizes to take, so that on a small volume the other half stays for the state."""
    volume = os.statvfs(folder)
    return min(1.0, volume.f_blocks * volume.f_frsize / ROOMY_BYTES)


def _make_room(incidents: Path, newest: Path) -> None:
    """Give up what came soonest after another: of an engine that dies again and again, the first deaths stay."""
    found = [(at, file) for file in list_incidents(incidents) if (at := parse_start(file)) is not None]
    while len(found) > MOST_INCIDENTS:
        gaps = [(at - before, file) for (before, _), (at, file) in pairwise(found)]
        _, given_up = min((gap, file) for gap, file in gaps if file != newest)
        given_up.unlink(missing_ok=True)
        found = [each for each in found if each[1] != given_up]


def _read_lines(folder: Path) -> Iterator[bytes]:
    """Yield the lines of the record, of what is none parts of bounded length; a pipe or a device is not opened."""
    for file in (folder / f"{FLIGHT}.1", folder / FLIGHT):
        if file.is_file():
            with file.open("rb") as stream:
                yield from iter(partial(stream.readline, LONGEST_LINE), b"")


def _select_samples(lines: Iterable[bytes], seconds: float, most_bytes: int) -> Iterable[bytes]:
    """Return the samples from so long before a time on, thinned out, the newest of them where that is too much."""
    kept: deque[bytes] = deque()
    size, slot = 0, -1
    for each in lines:
        time = _parse_time(each)
        if time is None or time < seconds - BEFORE_SECONDS:
            continue
        if time < seconds - CLOSE_SECONDS:
            if int(time // SPARSE_SECONDS) == slot:
                continue
            slot = int(time // SPARSE_SECONDS)
        kept.append(each)
        size += len(each)
        while size > most_bytes:
            size -= len(kept.popleft())
    return kept


def _parse_time(sample: bytes) -> float | None:
    """Return the time of a sample; None of what is no whole one."""
    found = _TIME.match(sample)
    return float(found[1]) if found is not None and sample.endswith(b"\n") else None
