"""Days without a leak for hours: what the detector reports falsely, per GPU-year with its 95 % interval.

usage: benign.py [--generator curves mechanisms] [--seed 1000] [--interval 15] [--hours 8]
                 [--file .cache/leak-benign.jsonl]
Each day is a line of the file. A second start goes on after them, and --hours 0 only prints.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

import generate
from oncall import bound_rate
from simulator.scenarios import SCENARIOS
from traces import MAKERS, Labelled, thin
from watch import follow, watch

Row = dict[str, Any]
BENIGN = {
    "curves": tuple(name for name in generate.BENIGN if name not in generate.AMBIGUOUS),
    "mechanisms": tuple(name for name, recipe in SCENARIOS.items() if name.startswith("ok_") and not recipe.ambiguous),
}


def describe(title: str, rows: list[Row]) -> str:
    days = sum(row["days"] for row in rows)
    cells = [title, f"{days:,.0f}"]
    for key in ("false", "early_false"):
        events = sum(row[key] for row in rows)
        rate, lower, upper = bound_rate(events, days)
        cells.append(f"{events}: {rate:.1f} ({lower:.1f} to {upper:.1f})")
    longest = max((row["lasts_minutes"] for row in rows), default=0.0)
    return "| " + " | ".join((*cells, f"{longest:.0f}")) + " |"


def list_days(generators: list[str], first_seed: int) -> Iterator[tuple[str, str, int]]:
    for seed in count(first_seed):
        for generator in generators:
            for name in BENIGN[generator]:
                yield generator, name, seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generator", nargs="*", choices=list(BENIGN), default=list(BENIGN))
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--interval", type=float, default=15.0)
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--file", type=Path, default=Path(".cache/leak-benign.jsonl"))
    arguments = parser.parse_args()
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in arguments.file.read_text().splitlines()] if arguments.file.exists() else []
    done = {(row["generator"], row["scenario"], row["seed"]) for row in rows}
    ends = monotonic() + arguments.hours * 3600
    with arguments.file.open("a") as file:
        for generator, name, seed in list_days(arguments.generator, arguments.seed):
            if monotonic() >= ends:
                break
            if (generator, name, seed) not in done:
                trace = MAKERS[generator](name, seed, 24.0, arguments.interval)
                row = follow(watch(Labelled(thin(trace.samples, arguments.interval), trace.truth)))
                rows.append(row | {"generator": generator})
                file.write(json.dumps(rows[-1]) + "\n")
                file.flush()
    print(
        "| | benign days | false `leaking` per GPU-year | false `growing` per GPU-year"
        " | longest after the growth, minutes |"
    )
    print("| --- | --- | --- | --- | --- |")
    for generator in dict.fromkeys(row["generator"] for row in rows):
        print(describe(generator, [row for row in rows if row["generator"] == generator]))


if __name__ == "__main__":
    main()
