"""How long a steady leak takes to be seen, and what the pager sees, by its rate, the room and the sampling interval.

usage: delays.py [--seeds 3] [--write docs/leaks.md]
A leak by time at ten requests a second, in segments of 2 MiB, beneath 200 MiB of slack and the high-water marks of a
new engine. It is followed until it is out of memory, at most two days.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np
from rent import write_table

from vllm_headroom.derive.leak.facts import Certainty, Observation, start_track
from vllm_headroom.derive.leak.track import observe
from vllm_headroom.units import DAY_SECONDS, HOUR_SECONDS, MIB

RATES = (10e3, 50e3, 200e3, 1e6, 5e6)
ROOMS = (4, 16, 60)
INTERVALS = (5.0, 30.0)
REQUESTS_PER_SECOND = 10.0
SLACK_BYTES = 200 * MIB
MOST_SECONDS = 2 * DAY_SECONDS
MARKS = ("<!-- delays: begin -->", "<!-- delays: end -->")
HEAD = (
    "| rate | room | read each | `growing` after | `leaking` after | leaked by then"
    " | critical before OOM | page before OOM |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- |"
)


def read_memory(rate: float, room: float, interval: float, seed: int) -> Iterator[Observation]:
    rng = np.random.default_rng(seed)
    marks, total = np.zeros(3), 70e9 + room
    for seconds in np.arange(0.0, MOST_SECONDS, interval):
        demands = rng.gumbel(size=3) + np.log(REQUESTS_PER_SECOND * interval)
        marks = np.maximum(marks, demands)
        leaked = max(0.0, rate * seconds - SLACK_BYTES) // (2 * MIB) * 2 * MIB
        held_bytes = int(70e9 + 40 * MIB * float(marks.sum()) + leaked)
        yield Observation(
            seconds=float(seconds),
            held_bytes=held_bytes,
            finished_total=REQUESTS_PER_SECOND * seconds,
            running=30.0,
            run_id="a",
            room_bytes=int(total - held_bytes),
        )
        if held_bytes >= total - 100 * MIB:
            return


def follow(rate: float, room: float, interval: float, seed: int) -> dict[str, float]:
    """Return the seconds of each first verdict and alert, and of the end."""
    track = start_track(0.0)
    first_seconds: dict[str, float] = {}
    for observation in read_memory(rate, room, interval, seed):
        track = observe(track, observation)
        left_seconds = None if track.estimate is None else track.estimate.oom_seconds
        is_leaking = track.verdict is Certainty.LEAKING
        events = {
            "growing": track.verdict is not Certainty.NONE,
            "leaking": is_leaking,
            "critical": is_leaking and left_seconds is not None and left_seconds < DAY_SECONDS,
            "page": is_leaking and left_seconds is not None and left_seconds < HOUR_SECONDS,
        }
        for event, is_now in events.items():
            if is_now:
                first_seconds.setdefault(event, observation.seconds)
        first_seconds["end"] = observation.seconds
    return first_seconds


def show(values: list[float | None], unit: float, name: str) -> str:
    """Return median and worst; a value that never came is the worst."""
    known_values = [value / unit for value in values if value is not None]
    if not known_values:
        return "never"
    worst = "never" if len(known_values) < len(values) else f"{max(known_values):,.0f}"
    return f"{median(known_values):,.0f} {name} ({worst})"


def make_row(rate: float, room: int, interval: float, seeds: int) -> str:
    runs = [follow(rate, room * 1e9, interval, seed) for seed in range(seeds)]
    is_over = all(run["end"] < MOST_SECONDS - interval for run in runs)
    cells = [
        f"{rate / 1e3:,.0f} kB/s",
        f"{room} GB",
        f"{interval:.0f} s",
        show([run.get("growing") for run in runs], 60, "min"),
        show([run.get("leaking") for run in runs], 60, "min"),
        show([rate * run["leaking"] if "leaking" in run else None for run in runs], 1e6, "MB"),
    ]
    for event in ("critical", "page"):
        leads_seconds = [run["end"] - run[event] for run in runs if event in run]
        text = "never"
        if leads_seconds:
            text = f"{median(leads_seconds) / 60:,.0f} min ({min(leads_seconds) / 60:,.0f})"
        # Without an end of memory there is nothing to be ahead of.
        cells.append(text if is_over else "")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    rows = (
        make_row(rate, room, interval, arguments.seeds) for rate, room, interval in product(RATES, ROOMS, INTERVALS)
    )
    lines = [HEAD, *rows]
    print(*lines, sep="\n")
    write_table(arguments.write, MARKS, lines)


if __name__ == "__main__":
    main()
