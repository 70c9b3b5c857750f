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


def judge_one(job: tuple[str, str, int], options: argparse.Namespace) -> Row:
    """Return the row of one trace, with what the plain rules report on it."""
    generator, name, seed = job
    trace = MAKERS[generator](
        name, seed, options.hours, options.interval, attributed=not options.unattributed, probe=options.probe
    )
    plain_row = judge_plain_rules(trace.truth, read_series(trace))
    return judge(trace) | plain_row | {"generator": generator}


def format_middle(rows: list[Row], key: str) -> str:
    """Return the median of a figure in MB, of those rows that have it; empty without any."""
    values = [row[key] for row in rows if key in row]
    return f"{median(values):,.0f} MB" if values else ""


def format_share(rows: list[Row], key: str) -> str:
    """Return in how many rows this is true, of those that know it; empty without any."""
    values = [row[key] for row in rows if row.get(key) is not None]
    return f"{sum(values)} of {len(values)}" if values else ""


def format_line(title: str, rows: list[Row]) -> str:
    """Return the table's line for these rows."""
    leaks = [row for row in rows if row["leak"]]
    cells = [
        title,
        format_share(leaks, "found"),
        format_middle(leaks, "mb"),
        format_middle(leaks, "early_mb"),
        format_share(leaks, "held"),
        _format_false(rows, "false"),
        _format_false(rows, "early_false"),
    ]
    for rule in ("linear", "trend"):
        false_traces = sum(row[f"{rule}_false"] for row in rows)
        parts = (format_share(leaks, f"{rule}_found"), str(false_traces))
        cells.append(", ".join(part for part in parts if part))
    return "| " + " | ".join(cells) + " |"


def _format_false(rows: list[Row], key: str) -> str:
    """Return the false alarms and the days in which they came; empty where leaks alone have hardly a day."""
    days = sum(row["days"] for row in rows)
    if days < 1 and all(row["leak"] for row in rows):
        return ""
    decimals = 0 if days >= 1 else 1
    return f"{sum(row[key] for row in rows)} in {days:.{decimals}f} days"


def list_table(results: list[Row]) -> list[str]:
    """Return the lines of the table: each generator's groups, then its totals."""
    lines = [HEAD]
    for generator in MAKERS:
        lines += _list_generator(generator, [row for row in results if row["generator"] == generator])
    return lines


def _list_generator(generator: str, rows: list[Row]) -> list[str]:
    ordinary = [row for row in rows if not row["ambiguous"]]
    held_out = [row for row in ordinary if is_held_out(row["scenario"])]
    tuned_on = [row for row in ordinary if row not in held_out]
    # Nobody looks at single recorded days that are held out: their groups are not shown.
    lines = _list_groups(generator, tuned_on if generator == RECORDED else ordinary)
    if not held_out:
        lines += _list_total(f"{generator}: all", ordinary)
    else:
        other_title = "not held out" if generator == RECORDED else "tuned on"
        lines += _list_total(f"{generator}: {other_title}", tuned_on)
        lines += _list_total(f"{generator}: held out", held_out)
    return lines + _list_total(f"{generator}: ambiguous", [row for row in rows if row["ambiguous"]])


def _list_groups(generator: str, rows: list[Row]) -> list[str]:
    """Return a line for each group of scenarios."""
    lines = []
    for group in dict.fromkeys(row["group"] for row in rows):
        group_rows = [row for row in rows if row["group"] == group]
        lines.append(format_line(f"{generator}: {group}", group_rows))
    return lines


def _list_total(title: str, rows: list[Row]) -> list[str]:
    """Return a line in bold for these rows; none without rows."""
    return [format_line(f"**{title}**", rows)] if rows else []


def list_totals(results: list[Row]) -> list[str]:
    """Return sentences on the estimates, the locations and the longest false alarm."""
    lines = []
    for generator in MAKERS:
        leaks = [row for row in results if row["generator"] == generator and row["leak"]]
        for prefix in ("first", "last"):
            lines += _describe_estimates(generator, leaks, prefix)
    if any("placed" in row for row in results):
        lines.append(f"where it leaks was named right in {format_share(results, 'placed')} leaks")
    ordinary_minutes = [row["lasts_minutes"] for row in results if not row["ambiguous"]]
    longest_minutes = max(ordinary_minutes, default=0.0)
    lines.append(f"the longest ordinary false alarm lasted {longest_minutes:.0f} minutes after growth had ended")
    return lines


def _describe_estimates(generator: str, leaks: list[Row], prefix: str) -> list[str]:
    """Return a sentence on how good the first or the last estimates were; none without any."""
    errors = [row[f"{prefix}_error"] for row in leaks if f"{prefix}_error" in row]
    if not errors:
        return []
    sentence = (
        f"{generator}, {prefix} estimate: rate off by {100 * median(errors):.0f} % (median),"
        f" its interval covers {format_share(leaks, f'{prefix}_covered')};"
        f" OOM not before the lower bound in {format_share(leaks, f'{prefix}_in_time')}"
    )
    return [sentence]


def write(path: Path, text: str) -> None:
    """Put the text between the marks of a file."""
    head, _, following = path.read_text().partition(MARKS[0])
    _, _, tail = following.partition(MARKS[1])
    path.write_text(f"{head}{MARKS[0]}\n{text}\n{MARKS[1]}{tail}")


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
    options = parser.parse_args()
    with ProcessPoolExecutor(options.jobs) as pool:
        results = list(pool.map(partial(judge_one, options=options), list_jobs(options)))
    if options.each:
        print(*results, sep="\n")
    lines = list_table(results)
    sentences = list_totals(results)
    print(*lines, *sentences, sep="\n")
    if options.write is not None:
        listed = "\n".join(f"- {sentence}." for sentence in sentences)
        write(options.write, "\n".join(lines) + "\n\n" + listed)


def list_jobs(options: argparse.Namespace) -> list[tuple[str, str, int]]:
    """Return generator, scenario and seed of each trace that the options choose."""
    jobs = []
    for generator in options.generator:
        # A recorded day has no seed, and is read once.
        seeds = range(1) if generator == RECORDED else parse_seeds(options.seeds)
        for name in NAMES[generator]:
            is_wanted = not options.scenario or name in options.scenario
            if is_wanted and (is_held_out(name) or not options.held_out):
                jobs += [(generator, name, seed) for seed in seeds]
    return jobs


def parse_seeds(text: str) -> range:
    """Return the seeds of a text like 3 or 0-2."""
    lowest, _, highest = text.partition("-")
    return range(int(lowest), int(highest or lowest) + 1)


if __name__ == "__main__":
    main()
