"""Make an asset of the contract tests of what `record_real` recorded: fewer samples, with the truth beside them.

python -m tests.engine.thin_real FOLDER NAME
"""

from __future__ import annotations

import gzip
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from vllm_headroom.trace.write import HEADER, line

ASSETS: Final = Path(__file__).parent.parent / "contract" / "memory"
EVERY: Final = 3
TRUTH_EVERY_SECONDS: Final = 300.0
ENGINE_FACTS: Final = ("model_name", "engine", "running", "waiting", "finished_total", "awake", "started_at")


def samples(trace: Path) -> list[dict[str, Any]]:
    """Return every third sample, with what the detector looks at."""
    lines = [json.loads(each) for each in trace.read_text().splitlines()[1:]]
    for sample in lines:
        for engine in sample["engines"] or []:
            for fact in engine.keys() - set(ENGINE_FACTS):
                del engine[fact]
    return lines[::EVERY]


def kept(told: Path) -> list[dict[str, float]]:
    """Return the last that the plugin told in each five minutes: what it had kept by then."""
    lines = [json.loads(each) for each in told.read_text().splitlines()]
    slots = [int((each["t"] - lines[0]["t"]) / TRUTH_EVERY_SECONDS) for each in lines]
    ends = [place for place, (slot, following) in enumerate(pairwise(slots)) if slot != following]
    return [{**lines[place], "t": round(lines[place]["t"], 3)} for place in (0, *ends, len(lines) - 1)]


def thin(folder: Path, name: str) -> None:
    """Write both files."""
    plan = json.loads((folder / "plan.json").read_text())
    ways = dict(pair.split("=") for pair in plan["leaks"].split())
    leaks = {role: {"way": way, "kept": kept(folder / f"{role}.jsonl")} for role, way in ways.items()}
    (ASSETS / f"{name}.json").write_text(json.dumps({**plan, "leaks": leaks}, indent=1) + "\n")
    found = samples(folder / "trace.jsonl")
    with (ASSETS / f"{name}.jsonl.gz").open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as stream:
        stream.write(b"".join(line(record) for record in (HEADER, *found)))


if __name__ == "__main__":
    thin(Path(sys.argv[1]), sys.argv[2])
