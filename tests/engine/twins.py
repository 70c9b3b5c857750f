"""What the probe costs a real vLLM: one with it beside one without, asked in turn, and the CPU that a request took.

    ENGINE_FOLDER=.engine python -m tests.engine.twins SLICES SECONDS

Half the slices are of each twin. Prints a line of JSON for each slice, and mean and standard deviation at the end.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.engine.probed import Probed, probed
from tests.engine.serving import words

CLIENTS: Final = 4
TOKENS: Final = 4
TURNS: Final = ("without", "with", "with", "without")
"""So that neither has the earlier half of the time: a machine with other work grows busier and calmer."""

TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")


def cpu_seconds(engine: Probed) -> float:
    """Return what all of its processes have used."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[2]) == engine.process.pid:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS_PER_SECOND


def asked(engine: Probed, seconds: float) -> int:
    """Let clients ask, each when it has been answered; return how many answers there were."""
    ends, answered = time.monotonic() + seconds, itertools.count()

    def ask(number: int) -> None:
        chance = random.Random(number)  # noqa: S311 - a load, not a secret
        while time.monotonic() < ends:
            engine.complete(words(chance.randrange(1000), 32), TOKENS)
            next(answered)

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    return next(answered)


@contextmanager
def twins() -> Iterator[dict[str, Probed]]:
    """Serve both; the one without the probe has it on its path as well, where it does nothing."""
    with tempfile.TemporaryDirectory() as first_folder, tempfile.TemporaryDirectory() as second:
        quiet = ("--num-gpu-blocks-override", "512", "--disable-uvicorn-access-log")
        with (
            probed(Path(first_folder), *quiet) as probed_engine,
            probed(Path(second), *quiet, HEADROOM_PROBE_DIR="") as untold,
        ):
            yield {"with": probed_engine, "without": untold}


def compare(slices: int, seconds: float) -> None:
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in TURNS}
    with twins() as engines:
        for engine in engines.values():
            asked(engine, seconds / 10)  # the first requests of a process cost more
        for name, _ in zip(itertools.cycle(TURNS), range(slices), strict=False):
            engine, began, used = engines[name], time.monotonic(), cpu_seconds(engines[name])
            requests = asked(engine, seconds)
            used, lasted = cpu_seconds(engine) - used, time.monotonic() - began
            figures[name].append((1000 * used / requests, requests / lasted))
            tell(
                {"twin": name, "requests": requests, "cpu_ms": figures[name][-1][0], "per_second": figures[name][-1][1]}
            )
    for name, rows in figures.items():
        for title, samples in zip(("CPU ms a request", "requests a second"), zip(*rows, strict=True), strict=True):
            tell({"twin": name, "what": title, "mean": statistics.mean(samples), "sd": statistics.stdev(samples)})


def tell(line: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    compare(int(sys.argv[1]), float(sys.argv[2]))
