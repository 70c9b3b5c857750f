"""Record minutes of the real vLLM on a stand-in card by our daemon, each second, beside the days of torch alone.

usage: CARD_FOLDER=FOLDER python -m tests.card.corpus.record_vllm [--minutes 12] [--into FOLDER] [NAME ...]
Its time is real and its load that of a busy machine: no two recordings are the same.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from tests.card.bench import Bench, wait_until_served, watch
from tests.card.card import GIB, MIB, Cards
from tests.card.corpus.record import TRACES, keep

OPTIONS: Final = (
    "--enforce-eager",
    "--max-model-len",
    "2048",
    "--max-num-seqs",
    "64",
    "--gpu-memory-utilization",
    "0.7",
)
CLIENTS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the worker is ordered to keep: so many MiB, every so many seconds, from a minute on."""

    origin: str
    leak_mib: int = 0
    every_seconds: float = 1.0
    onset_minutes: float = 3.0


PLANS: Final = {
    "ok-vllm-lengths": Plan(origin="real vLLM, mixed lengths"),
    "leak-vllm-even": Plan(origin="real vLLM, even", leak_mib=4, every_seconds=2.0),
    "leak-vllm-fast": Plan(origin="real vLLM, fast", leak_mib=24, every_seconds=1.0, onset_minutes=5.5),
}


def record(plan: Plan, name: str, place: Path, minutes: float) -> Iterator[bytes]:
    """Yield the lines of the trace, the truth first."""
    trace = place / "trace.jsonl"
    cards = Cards(folder=place / "cards", total_bytes=24 * GIB)
    with watch(place, *OPTIONS, cards=cards, TRACE_FILE=str(trace), SAMPLE_INTERVAL_SECONDS="1") as bench:
        wait_until_served(bench)
        began = time.time()
        with ThreadPoolExecutor(CLIENTS) as pool:
            asking = [pool.submit(ask, bench, Random(number), began + 60 * minutes) for number in range(CLIENTS)]  # noqa: S311 - a load
            course = list(leak(bench, plan, began + 60 * minutes))
            for request_task in asking:
                request_task.result()
    header, *samples = trace.read_bytes().splitlines()
    times = [json.loads(line)["t"] for line in samples]
    truth = {
        "scenario": name,
        "seed": 0,
        "origin": plan.origin,
        "group": "fast" if name.endswith("fast") else "real vLLM",
        "leak": plan.leak_mib > 0,
        "ambiguous": False,
        "series": "gpu",
        "location": "tensors" if plan.leak_mib else None,
        "steady": False,
        "retries": 0,
        "onset": course[0][0] if plan.leak_mib else times[0],
        "started": times[0],
        "ends": times[-1],
        "oom_at": None,
        "t": [seconds for seconds, _ in course] or [times[0]],
        "leaked_bytes": [leaked_bytes for _, leaked_bytes in course] or [0],
    }
    yield json.dumps({**json.loads(header), "truth": truth}, separators=(",", ":")).encode()
    yield from samples


def ask(bench: Bench, chance: Random, until: float) -> None:
    """Ask for completions of prompts whose lengths differ, one after another."""
    while time.time() < until:
        words = int(min(1500, chance.lognormvariate(4.5, 1.0)))
        prompt = " ".join(f"w{chance.randrange(300, 900)}" for _ in range(words))
        bench.complete(prompt=prompt, tokens=chance.randrange(4, 60))
        time.sleep(chance.uniform(0.0, 1.0))


def leak(bench: Bench, plan: Plan, until: float) -> Iterator[tuple[float, int]]:
    """Have the worker keep tensors until the end; yield the time and the bytes kept so far, 0 at first."""
    time.sleep(60 * plan.onset_minutes)
    leaked_bytes = 0
    while plan.leak_mib and time.time() < until:
        yield time.time(), leaked_bytes
        bench.order("tensors", plan.leak_mib * MIB)
        leaked_bytes += plan.leak_mib * MIB
        time.sleep(plan.every_seconds)


def main() -> None:
    """Record the named plans, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", default=list(PLANS))
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--into", type=Path, default=TRACES)
    arguments: Any = parser.parse_args()
    for name in arguments.names:
        with tempfile.TemporaryDirectory() as folder:
            written = b"\n".join(record(PLANS[name], name, Path(folder), arguments.minutes)) + b"\n"
        sys.stdout.write(f"{name}: {keep(name, written, arguments.into)}\n")


if __name__ == "__main__":
    main()
