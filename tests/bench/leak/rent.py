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
from measure import format_middle, format_share, parse_seeds
from traces import MAKERS, NAMES, RECORDED, Labelled, is_held_out, thin
from watch import Watched, follow, watch

from vllm_headroom.derive.leak import growth_evidence, precedent, track
from vllm_headroom.derive.leak import judge as verdicts

Row = dict[str, Any]
OFF: Final[dict[str, tuple[Any, str, Any]]] = {
    "nothing": (verdicts, "WITNESS_ODDS_LIMIT", verdicts.WITNESS_ODDS_LIMIT),
    "how often it rises": (growth_evidence, "RISE_SOURCES", 0.0),
    "pace": (verdicts, "weigh_pace", lambda *_: verdicts.WITNESS_ODDS_LIMIT),
    "shape": (verdicts, "is_even", lambda _: True),
    "clipped rises": (growth_evidence, "CLIP_MEDIANS", 1e9),
    "patience": (growth_evidence, "compute_patience", lambda *_, **__: growth_evidence.GROWING_SECONDS),
    "keeps its pace": (verdicts, "is_fading", lambda _: False),
    "most of the room": (verdicts, "find_growth_without_room", lambda *_: None),
    "large steps": (verdicts, "find_step_windows", lambda *_: ()),
    "sizes of steps": (growth_evidence, "score_likeness", lambda *_: 0.0),
    "load that doubled": (track, "LOAD_LEAP", 1e9),
    "steady growth": (verdicts, "is_steady", lambda _: False),
    "lows that rise": (verdicts, "LOW_SHARE", float("inf")),
    "no concern": (verdicts, "NO_CONCERN_SECONDS", float("inf")),
    "next step": (growth_evidence, "LEAST_REPEATS", float("inf")),
    "room that is gone": (verdicts, "is_room_gone", lambda _: False),
    "a straight line": (verdicts, "is_straight", lambda _: False),
    "a record of load": (verdicts, "is_busiest", lambda *_: False),
    "full and breathing": (verdicts, "is_breathing", lambda *_: False),
    "a start": (verdicts, "looks_like_start", lambda *_: False),
    "released before": (precedent, "has_released", lambda *_: False),
    "yesterday": (verdicts, "find_excused_bytes", lambda _: 0.0),
    "kept on a full card": (verdicts, "NEARLY_FULL_BYTES", float("-inf")),
}
"""What is replaced, so that a witness is no evidence; without large steps nothing is reported about them."""

PLAIN = {
    "challenger": "a challenger of 50 lines",
    "linear": "`predict_linear`",
    "squares": "least squares",
    "trend": "Mann-Kendall",
    "threshold": "a threshold",
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
        cached: Watched = pickle.loads(path.read_bytes())
        return cached
    trace = MAKERS[generator](name, seed, 24.0, interval)
    if trace.truth["group"] != "fast":
        trace = Labelled(thin(trace.samples, interval), trace.truth)
    watched = watch(trace)
    CACHE.mkdir(parents=True, exist_ok=True)
    # Under another name first: a run that is stopped must leave no half of a file.
    unfinished = path.with_suffix(".new")
    unfinished.write_bytes(pickle.dumps(watched))
    unfinished.replace(path)
    return watched


def judge_each(job: tuple[str, str, int], interval: float) -> dict[str, Row]:
    """Return the row of a trace with each witness off, by the witness; "nothing" has the plain rules too."""
    watched = read_watched(*job, interval)
    rows: dict[str, Row] = {}
    for witness, (module, name, replacement) in OFF.items():
        with patch.object(module, name, replacement):
            rows[witness] = follow(watched)
    _, truth, readings = watched
    rows["nothing"] |= judge_plain_rules(truth, readings)
    return rows


def format_line(title: str, rows: list[Row]) -> str:
    """Return the table's line for the rows with one witness off."""
    ordinary, ambiguous = _split_rows(rows)
    leaks = [row for row in ordinary if row["leak"]]
    cells = (
        title,
        format_share(leaks, "found"),
        format_share(_list_large_steps(leaks), "found"),
        format_middle(leaks, "mb"),
        format_share(leaks, "held"),
        str(sum(row["onsets"] > 2 for row in leaks)),
        _format_false(ordinary),
        _format_false(ambiguous),
    )
    return "| " + " | ".join(cells) + " |"


def format_plain_line(title: str, rule: str, rows: list[Row]) -> str:
    """Return the table's line for a plain rule in place of the detector."""
    ordinary, ambiguous = _split_rows(rows)
    leaks = [row for row in ordinary if row["leak"]]
    found_share = format_share(leaks, f"{rule}_found")
    found_large = format_share(_list_large_steps(leaks), f"{rule}_found")
    false_traces = sum(row[f"{rule}_false"] for row in ordinary)
    false_ambiguous = sum(row[f"{rule}_false"] for row in ambiguous)
    return (
        f"| instead: {title} | {found_share} | {found_large} | | | | on {false_traces} traces | on {false_ambiguous} |"
    )


def _split_rows(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Return the ordinary rows, and the ambiguous ones."""
    ordinary = [row for row in rows if not row["ambiguous"]]
    ambiguous = [row for row in rows if row["ambiguous"]]
    return ordinary, ambiguous


def _list_large_steps(leaks: list[Row]) -> list[Row]:
    return [row for row in leaks if row["group"] == "large steps"]


def _format_false(rows: list[Row]) -> str:
    events = sum(row["false"] for row in rows)
    days = sum(row["days"] for row in rows)
    return f"{events} in {days:.0f} days"


def write_table(path: Path | None, marks: tuple[str, str], lines: list[str]) -> None:
    """Put a table between its marks in a file, if one is given."""
    if path is None:
        return
    head, _, following = path.read_text().partition(marks[0])
    _, _, tail = following.partition(marks[1])
    table = "\n".join(lines)
    path.write_text(f"{head}{marks[0]}\n{table}\n{marks[1]}{tail}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generator", nargs="*", choices=list(MAKERS), default=list(MAKERS))
    parser.add_argument("--seeds", default="170")
    parser.add_argument("--open", action="store_true", help="without what is held out")
    parser.add_argument("--interval", type=float, default=15.0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    jobs = []
    for generator in options.generator:
        # A recorded day has no seed, and is read once.
        seeds = range(1) if generator == RECORDED else parse_seeds(options.seeds)
        for name in NAMES[generator]:
            if not (options.open and is_held_out(name)):
                jobs += [(generator, name, seed) for seed in seeds]
    with ProcessPoolExecutor(options.jobs) as pool:
        results = list(pool.map(partial(judge_each, interval=options.interval), jobs))
    rows_with_all = [rows["nothing"] for rows in results]
    lines = [HEAD]
    lines += [format_line(witness, [rows[witness] for rows in results]) for witness in OFF]
    lines += [format_plain_line(title, rule, rows_with_all) for rule, title in PLAIN.items()]
    print(*lines, sep="\n")
    write_table(options.write, MARKS, lines)


if __name__ == "__main__":
    main()
