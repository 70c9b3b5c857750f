"""What each witness of the leak detector buys: the totals of all sets with one witness off at a time.

usage: rent.py [--generator curves mechanisms "real allocator"] [--seeds 170] [--open] [--interval 15]
               [--jobs 2] [--write FILE]
What was observed of a trace is kept in .cache/leak-watched, so that a second run costs a tenth. The memory in use
that a probe shows, and what is kept in sleep, are left out (watch.py).
"""

from __future__ import annotations

import argparse
import pickle
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from judge import judge_plain_rules
from measure import middle, share
from traces import MAKERS, NAMES, RECORDED, Labelled, is_held_out, thin
from watch import Watched, follow, watch

from vllm_headroom.derive.leak import growth_evidence, track
from vllm_headroom.derive.leak import judge as verdicts

Row = dict[str, Any]
OFF: Final[dict[str, tuple[Any, str, Any]]] = {
    "nothing": (verdicts, "WITNESS_ODDS_LIMIT", verdicts.WITNESS_ODDS_LIMIT),
    "how often it rises": (growth_evidence, "RISE_SOURCES", 0.0),
    "pace": (verdicts, "weigh_pace", lambda *_: verdicts.WITNESS_ODDS_LIMIT),
    "shape": (verdicts, "is_even", lambda _: True),
    "clipped rises": (growth_evidence, "CLIP_MEDIANS", 1e9),
    "patience": (verdicts, "compute_patience", lambda _: growth_evidence.GROWING_SECONDS),
    "large steps": (verdicts, "find_step_windows", lambda *_: ()),
    "sizes of steps": (growth_evidence, "score_likeness", lambda *_: 0.0),
    "load that doubled": (track, "LOAD_LEAP", 1e9),
    "steady growth": (verdicts, "is_steady", lambda _: False),
    "lows that rise": (verdicts, "LOW_SHARE", float("inf")),
    "no concern": (verdicts, "NO_CONCERN_SECONDS", float("inf")),
    "next step": (growth_evidence, "LEAST_REPEATS", float("inf")),
    "a straight line": (verdicts, "is_straight", lambda _: False),
    "a record of load": (verdicts, "is_busiest", lambda *_: False),
    "full and breathing": (verdicts, "is_breathing", lambda *_: False),
    "yesterday": (verdicts, "find_excused_bytes", lambda _: 0.0),
    "kept on a full card": (verdicts, "NEARLY_FULL_BYTES", float("-inf")),
}
"""What is replaced, so that a witness is no evidence; without large steps nothing is reported about them."""

PLAIN = {
    "challenger": "a challenger of 50 lines",
    "linear": "`predict_linear`",
    "squares": "least squares",
    "trend": "Mann-Kendall",
}
MARKS = ("<!-- rent: begin -->", "<!-- rent: end -->")
HEAD = (
    "| off | leaks found | of large steps | leaked at `leaking` (median) | held at OOM"
    " | more than two onsets | false `leaking` | ambiguous |"
    "\n| --- | --- | --- | --- | --- | --- | --- | --- |"
)
CACHE = Path(__file__).parents[3] / ".cache" / "leak-watched"


def read_watched(generator: str, name: str, seed: int, interval: float) -> Watched:
    """Return what was observed of a trace: from the cache, or as is put there."""
    path = CACHE / f"{generator}+{name}+{seed}+{interval:g}.pickle".replace(" ", "_")
    if path.exists():
        found: Watched = pickle.loads(path.read_bytes())
        return found
    trace = MAKERS[generator](name, seed, 24.0, interval)
    if trace.truth["group"] != "fast":
        trace = Labelled(thin(trace.samples, interval), trace.truth)
    found = watch(trace)
    CACHE.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_bytes(pickle.dumps(found))
    new.replace(path)
    return found


def judge_each(job: tuple[str, str, int], interval: float) -> dict[str, Row]:
    watched, found = read_watched(*job, interval), {}
    for off, (where, what, instead) in OFF.items():
        with patch.object(where, what, instead):
            found[off] = follow(watched)
    found["nothing"] |= judge_plain_rules(watched[1], watched[2])
    return found


def line(title: str, rows: list[Row]) -> str:
    ordinary, ambiguous = ([row for row in rows if row["ambiguous"] is which] for which in (False, True))
    leaks = [row for row in ordinary if row["leak"]]
    cells = (
        title,
        share(leaks, "found"),
        share([row for row in leaks if row["group"] == "large steps"], "found"),
        middle(leaks, "mb"),
        share(leaks, "held"),
        str(sum(row["onsets"] > 2 for row in leaks)),
        f"{sum(row['false'] for row in ordinary)} in {sum(row['days'] for row in ordinary):.0f} days",
        f"{sum(row['false'] for row in ambiguous)} in {sum(row['days'] for row in ambiguous):.0f} days",
    )
    return "| " + " | ".join(cells) + " |"


def plain_line(title: str, key: str, rows: list[Row]) -> str:
    ordinary, ambiguous = ([row for row in rows if row["ambiguous"] is which] for which in (False, True))
    leaks = [row for row in ordinary if row["leak"]]
    found, large = (
        share(each, f"{key}_found") for each in (leaks, [row for row in leaks if row["group"] == "large steps"])
    )
    false, unclear = (sum(row[f"{key}_false"] for row in each) for each in (ordinary, ambiguous))
    return f"| instead: {title} | {found} | {large} | | | | on {false} traces | on {unclear} |"


def write_table(path: Path | None, marks: tuple[str, str], lines: list[str]) -> None:
    """Put a table between its marks in a file, if one is given."""
    if path is not None:
        before, rest = path.read_text().split(marks[0])
        path.write_text(f"{before}{marks[0]}\n" + "\n".join(lines) + f"\n{marks[1]}{rest.split(marks[1])[1]}")


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
    with ProcessPoolExecutor(given.jobs) as pool:
        results = list(pool.map(partial(judge_each, interval=given.interval), jobs))
    whole = [result["nothing"] for result in results]
    lines = [HEAD, *(line(off, [each[off] for each in results]) for off in OFF)]
    lines += [plain_line(title, key, whole) for key, title in PLAIN.items()]
    print(*lines, sep="\n")
    write_table(given.write, MARKS, lines)


if __name__ == "__main__":
    main()
