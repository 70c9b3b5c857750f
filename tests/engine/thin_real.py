"""Make an asset of the contract tests of what `record_real` recorded: fewer samples, with the truth beside them.

python -m tests.engine.thin_real FOLDER NAME [MINUTES]

Only the first MINUTES are kept, where they are given.
"""

from __future__ import annotations

import gzip
import json
import sys
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any, Final

from vllm_headroom.trace.entries import HEADER, encode_line

ASSETS: Final = Path(__file__).parent.parent / "contract" / "memory"
EVERY: Final = 3
TRUTH_EVERY_SECONDS: Final = 300.0
ENGINE_FACTS: Final = ("model_name", "engine", "running", "waiting", "finished_total", "awake", "started_at")


def samples(trace: Path, most_seconds: float) -> list[dict[str, Any]]:
    """Return every third sample, with what the detector looks at."""
    lines = [json.loads(line) for line in trace.read_text().splitlines()[1:]]
    lines = [sample for sample in lines if sample["t"] - lines[0]["t"] <= most_seconds]
    for sample in lines:
        for engine in sample["engines"] or []:
            for fact in engine.keys() - set(ENGINE_FACTS):
                del engine[fact]
    return lines[::EVERY]


def kept(path: Path, ends: float) -> list[dict[str, float]]:
    """Return the last that the plugin reported in each five minutes: what it had kept by then."""
    lines = [line for line in map(json.loads, path.read_text().splitlines()) if line["t"] <= ends]
    slots = [int((line["t"] - lines[0]["t"]) / TRUTH_EVERY_SECONDS) for line in lines]
    last_places = [place for place, (slot, following) in enumerate(pairwise(slots)) if slot != following]
    return [{**lines[place], "t": round(lines[place]["t"], 3)} for place in (0, *last_places, len(lines) - 1)]


def thin(folder: Path, name: str, most_seconds: float) -> None:
    """Write both files."""
    kept_samples = samples(folder / "trace.jsonl", most_seconds)
    plan = json.loads((folder / "plan.json").read_text())
    ways = dict(pair.split("=") for pair in plan["leaks"].split())
    ends = kept_samples[-1]["t"]
    leaks = {role: {"way": way, "kept": kept(folder / f"{role}.jsonl", ends)} for role, way in ways.items()}
    (ASSETS / f"{name}.json").write_text(json.dumps({**plan, "leaks": leaks}, indent=1) + "\n")
    with (ASSETS / f"{name}.jsonl.gz").open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as stream:
        stream.write(b"".join(encode_line(record) for record in (HEADER, *kept_samples)))


if __name__ == "__main__":
    source, named, *minutes = sys.argv[1:]
    thin(Path(source), named, 60 * float(minutes[0]) if minutes else inf)
