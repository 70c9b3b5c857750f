"""Keep a real end for the tests: the newest incident of a daemon's folder, with the samples about it.

python -m tests.captures.ends.keep STATE_FOLDER NAME
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any, Final

from vllm_headroom.trace.entries import HEADER, encode_line
from vllm_headroom.trace.flight import FLIGHT, INCIDENT_KEY, find_newest

HERE: Final = Path(__file__).parent
BEFORE_SECONDS: Final = 600.0
PLACES: Final = (
    (re.compile(rb"127\.0\.0\.1:\d+"), b"127.0.0.1:8000"),
    (re.compile(rb"(?:/[\w.-]+)+/(probe|state)\b"), rb"/var/lib/headroom/\1"),
)
"""Ports and folders in the daemon's log, which differ from machine to machine."""


def read_samples(folder: Path, since: float) -> list[dict[str, Any]]:
    """Return the samples of the flight record, which has those after the incident too."""
    lines = (folder / FLIGHT).read_text().splitlines()[1:]
    return [sample for line in lines if (sample := json.loads(line))["t"] >= since]


def keep(folder: Path, name: str) -> None:
    """Write the capture."""
    newest = find_newest(folder)
    assert newest is not None, f"{folder} has no incident"
    incident_facts = newest[1]
    samples = read_samples(folder, incident_facts["t"] - BEFORE_SECONDS)
    lines = b"".join(map(encode_line, ({**HEADER, INCIDENT_KEY: incident_facts}, *samples)))
    for pattern, instead in PLACES:
        lines = pattern.sub(instead, lines)
    with (HERE / f"{name}.jsonl.gz").open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as stream:
        stream.write(lines)


if __name__ == "__main__":
    keep(Path(sys.argv[1]), sys.argv[2])
