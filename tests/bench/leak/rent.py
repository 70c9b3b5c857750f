"""What each witness of the leak detector buys: the totals of all sets with one witness off at a time.

usage: rent.py [--generator curves mechanisms "real allocator"] [--seeds 170] [--open] [--interval 15] [--jobs 2] [--write FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from judge import judge
from score import share
from traces import MAKERS, NAMES, RECORDED, Labelled, is_held_out

from vllm_headroom.derive.leak import growth
from vllm_headroom.derive.leak import judge as verdicts

Row = dict[str, Any]
OFF: Final[dict[str, tuple[Any, str, Any]]] = {
    "nothing": (verdicts, "MOST", verdicts.MOST),
    "how often it rises": (growth, "RECORDS", 0.0),
    "pace": (verdicts, "weigh_pace", lambda *_: verdicts.MOST),
    "shape": (verdicts, "is_even", lambda _: True),
    "patience": (verdicts, "compute_patience", lambda _: verdicts.GROWING_SECONDS),
    "large steps": (verdicts, "find_step_windows", lambda *_: ()),
    "sizes of steps": (growth, "score_likeness", lambda *_: 6.0),
}
"""What is replaced, so that a witness says nothing against a leak; without large steps nothing is said of them."""

MARKS = ("<!-- rent: begin -->", "<!-- rent: end -->")
HEAD = "| off | leaks found | of large steps | held at OOM | more than two onsets | false `leaking` | ambiguous |\n| --- | --- | --- | --- | --- | --- | --- |"


def judge_each(job: tuple[str, str, int], interval: float) -> dict[str, Row]:
    generator, name, seed = job
    trace = MAKERS[generator](name, seed, 24.0, interval)
    if trace.truth["group"] != "fast":
        trace = Labelled(thin(trace.samples, interval), trace.truth)
    found = {}
    for off, (where, what, instead) in OFF.items():
        with patch.object(where, what, instead):
            found[off] = judge(trace)
    return found


def thin(samples: list[Row], interval: float) -> list[Row]:
    kept, last = [], float("-inf")
    for sample in samples:
        if sample["t"] - last >= interval - 0.01 or sample is samples[-1]:
            kept.append(sample)
            last = sample["t"]
    return kept


def line(title: str, rows: list[Row]) -> str:
    ordinary, ambiguous = ([row for row in rows if row["ambiguous"] is which] for which in (False, True))
    leaks = [row for row in ordinary if row["leak"]]
    cells = (
        title,
        share(leaks, "found"),
        share([row for row in leaks if row["group"] == "large steps"], "found"),
        share(leaks, "held"),
        str(sum(row["onsets"] > 2 for row in leaks)),
        f"{sum(row['false'] for row in ordinary)} in {sum(row['days'] for row in ordinary):.0f} days",
        f"{sum(row['false'] for row in ambiguous)} in {sum(row['days'] for row in ambiguous):.0f} days",
    )
    return "| " + " | ".join(cells) + " |"


def plain_line(title: str, key: str, rows: list[Row]) -> str:
    ordinary = [row for row in rows if not row["ambiguous"]]
    false = sum(row[f"{key}_false"] for row in ordinary)
    found = share([row for row in ordinary if row["leak"]], f"{key}_found")
    return f"| {title} | {found} | | | | on {false} traces | |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generator", nargs="*", choices=list(MAKERS), default=list(MAKERS))
    parser.add_argument("--seeds", default="170")
    parser.add_argument("--open", action="store_true", help="without what is held out")
    parser.add_argument("--interval", type=float, default=15.0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    first, _, last = given.seeds.partition("-")
    jobs = [
        (generator, name, seed)
        for generator in given.generator
        for name in NAMES[generator]
        if not (given.open and is_held_out(name))
        for seed in ((0,) if generator == RECORDED else range(int(first), int(last or first) + 1))
    ]
    work: Callable[[tuple[str, str, int]], dict[str, Row]] = partial(judge_each, interval=given.interval)
    with ProcessPoolExecutor(given.jobs) as pool:
        results = list(pool.map(work, jobs))
    lines = [HEAD, *(line(off, [each[off] for each in results]) for off in OFF)]
    whole = [each["nothing"] for each in results]
    lines += [plain_line("instead: `predict_linear`", "linear", whole), plain_line("instead: Mann-Kendall", "trend", whole)]
    print(*lines, sep="\n")
    if given.write is not None:
        before, rest = given.write.read_text().split(MARKS[0])
        given.write.write_text(f"{before}{MARKS[0]}\n" + "\n".join(lines) + f"\n{MARKS[1]}{rest.split(MARKS[1])[1]}")


if __name__ == "__main__":
    main()
