"""Choose the settings of the simple rules on public seeds: the largest share of leaks found less that of false alarms.

usage: python tune.py [--seeds 6151] [--interval 60]
Both generators are used, without ambiguous days. What is printed goes into plain.py, as the defaults. Needs numpy.
"""

from __future__ import annotations

import argparse
from itertools import product
from typing import Any, NamedTuple

import plain
from score import parse_seeds
from traces import MAKERS, NAMES, thin

GENERATORS = ("curves", "mechanisms")


class Case(NamedTuple):
    """A trace of which it is known whether it leaks."""

    readings: list[plain.Reading]
    is_leak: bool
    onset: float


def read_case(generator: str, name: str, seed: int, interval: float) -> Case | None:
    """Return the case of a trace; None where it is ambiguous."""
    trace = MAKERS[generator](name, seed, 24.0, interval)
    if trace.truth["ambiguous"]:
        return None
    readings = plain.read_series(thin(trace.samples, interval), trace.truth["series"])
    return Case(readings, trace.truth["leak"], trace.truth["onset"])


def judge(rule: str, settings: dict[str, float], cases: list[Case]) -> tuple[float, int, int]:
    """Return the share of leaks found less the share of traces with a false alarm, and the two counts."""
    found_count = 0
    false = 0
    for case in cases:
        alarm = plain.RULES[rule](case.readings, **settings)
        if alarm is None:
            continue
        if case.is_leak and alarm >= case.onset:
            found_count += 1
        else:
            false += 1
    leak_count = sum(case.is_leak for case in cases)
    return found_count / leak_count - false / len(cases), found_count, false


def choose(rule: str, cases: list[Case]) -> tuple[dict[str, Any], tuple[float, int, int]]:
    """Return the best settings of a rule and their figures; of equal ones the first."""
    grid = plain.SETTINGS[rule]
    candidates = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    judged = [(settings, judge(rule, settings, cases)) for settings in candidates]
    return max(judged, key=lambda entry: entry[1][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=parse_seeds, default=parse_seeds("6151"))
    parser.add_argument("--interval", type=float, default=60.0)
    arguments = parser.parse_args()
    cases = []
    for generator in GENERATORS:
        for name, seed in product(NAMES[generator], arguments.seeds):
            case = read_case(generator, name, seed, arguments.interval)
            if case is not None:
                cases.append(case)
    leak_count = sum(case.is_leak for case in cases)
    for rule in plain.RULES:
        settings, (_, found_count, false) = choose(rule, cases)
        print(f"{rule}: {settings}, {found_count} of {leak_count} leaks, false on {false} of {len(cases)} traces")


if __name__ == "__main__":
    main()
