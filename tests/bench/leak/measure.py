"""Score the leak detector on labelled traces: of both generators, and recorded of torch's allocator.

usage: measure.py [--generator curves mechanisms "real allocator"] [--seeds 0-4] [--scenario NAME ...]
                [--held-out] [--hours 24] [--interval 5] [--jobs 2] [--unattributed] [--probe] [--write FILE]
Prints a row per scenario with --each, the groups and the totals; with --write puts the groups' table into FILE
between its marks. An alarm is a rise to state leaking; rises closer than an hour are one. The plain rules are on the
same traces.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from judge import judge, judge_plain_rules, read_series
from traces import MAKERS, NAMES, RECORDED, is_held_out

MARKS = ("<!-- measured: begin -->", "<!-- measured: end -->")
HEAD = (
    "| | leaks found | leaked at `leaking` | at `growing` | held at OOM | false `leaking` | false `growing`"
    " | `predict_linear`: found, false | Mann-Kendall: found, false |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)
Row = dict[str, Any]


def one(job: tuple[str, str, int], given: argparse.Namespace) -> Row:
    generator, name, seed = job
    trace = MAKERS[generator](
        name, seed, given.hours, given.interval, attributed=not given.unattributed, probe=given.probe
    )
    return judge(trace) | judge_plain_rules(trace.truth, read_series(trace)) | {"generator": generator}


def middle(rows: list[Row], key: str) -> str:
    values = [row[key] for row in rows if key in row]
    return f"{median(values):,.0f} MB" if values else ""


def share(rows: list[Row], key: str) -> str:
    values = [row[key] for row in rows if row.get(key) is not None]
    return f"{sum(values)} of {len(values)}" if values else ""


def line(title: str, rows: list[Row]) -> str:
    benign_days = sum(row["days"] for row in rows)

    def false(key: str) -> str:
        if benign_days < 1 and all(row["leak"] for row in rows):
            return ""
        return f"{sum(row[key] for row in rows)} in {benign_days:.{0 if benign_days >= 1 else 1}f} days"

    leaks = [row for row in rows if row["leak"]]
    cells = (
        title,
        share(leaks, "found"),
        middle(leaks, "mb"),
        middle(leaks, "early_mb"),
        share(leaks, "held"),
        false("false"),
        false("early_false"),
        *(
            ", ".join(filter(None, (share(leaks, f"{rule}_found"), str(sum(row[f"{rule}_false"] for row in rows)))))
            for rule in ("linear", "trend")
        ),
    )
    return "| " + " | ".join(cells) + " |"


def table(results: list[Row]) -> list[str]:
    lines = [HEAD]
    for generator in MAKERS:
        rows = [row for row in results if row["generator"] == generator]
        ordinary = [row for row in rows if not row["ambiguous"]]
        kept = [row for row in ordinary if is_held_out(row["scenario"])]
        shown = [row for row in ordinary if row not in kept] if generator == RECORDED else ordinary
        lines += [
            line(f"{generator}: {group}", [row for row in shown if row["group"] == group])
            for group in dict.fromkeys(row["group"] for row in shown)
        ]
        ambiguous = [row for row in rows if row["ambiguous"]]
        parts = [("all", ordinary), ("ambiguous", ambiguous)]
        if kept:
            others = "not held out" if generator == RECORDED else "tuned on"
            open_rows = [row for row in ordinary if row not in kept]
            parts = [(others, open_rows), ("held out", kept), ("ambiguous", ambiguous)]
        lines += [line(f"**{generator}: {title}**", chosen) for title, chosen in parts if chosen]
    return lines


def totals(results: list[Row]) -> list[str]:
    lines = []
    for generator in MAKERS:
        leaks = [row for row in results if row["generator"] == generator and row["leak"]]
        for which in ("first", "last"):
            errors = [row[f"{which}_error"] for row in leaks if f"{which}_error" in row]
            if errors:
                lines.append(
                    f"{generator}, {which} estimate: rate off by {100 * median(errors):.0f} % (median),"
                    f" its interval covers {share(leaks, f'{which}_covered')};"
                    f" OOM not before the lower bound in {share(leaks, f'{which}_in_time')}"
                )
    if any("placed" in row for row in results):
        lines.append(f"where it leaks was named right in {share(results, 'placed')} leaks")
    longest = max((row["lasts_minutes"] for row in results if not row["ambiguous"]), default=0.0)
    return [*lines, f"the longest ordinary false alarm lasted {longest:.0f} minutes after growth had ended"]


def write(path: Path, text: str) -> None:
    before, rest = path.read_text().split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    path.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generator", nargs="*", choices=list(MAKERS), default=list(MAKERS))
    parser.add_argument("--scenario", nargs="*")
    parser.add_argument("--held-out", action="store_true", help="only what nothing was tuned on")
    parser.add_argument("--seeds", default="0-2")
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--interval", type=float, default=5.0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--unattributed", action="store_true")
    parser.add_argument("--probe", action="store_true", help="with what a probe inside the engine reads")
    parser.add_argument("--each", action="store_true", help="a row for each trace too")
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    first, _, last = given.seeds.partition("-")
    jobs = [
        (generator, name, seed)
        for generator in given.generator
        for name in NAMES[generator]
        if (not given.scenario or name in given.scenario) and (not given.held_out or is_held_out(name))
        for seed in ((0,) if generator == RECORDED else range(int(first), int(last or first) + 1))
    ]
    with ProcessPoolExecutor(given.jobs) as pool:
        results = list(pool.map(partial(one, given=given), jobs))
    if given.each:
        print(*results, sep="\n")
    lines, closing = table(results), totals(results)
    print(*lines, *closing, sep="\n")
    if given.write is not None:
        said = "\n".join(f"- {sentence}." for sentence in closing)
        write(given.write, "\n".join(lines) + "\n\n" + said)


if __name__ == "__main__":
    main()
