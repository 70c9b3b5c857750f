"""Record the corpus again: real allocations of torch on a stand-in card, a compressed trace for each day.

usage: CARD_FOLDER=FOLDER python -m tests.card.corpus.record [--jobs 2] [--into FOLDER] [NAME ...]
`tests/card/setup.sh FOLDER` makes the folder. The same names give the same traces, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Final, Self

from tests.card.card import FOLDER, GIB, Cards

TRACES: Final = Path(__file__).with_name("traces")
ROOT: Final = Path(__file__).parents[3]
PRESET: Final = 9 | lzma.PRESET_EXTREME


class Driver:
    """A process with torch, which records one day after another; `card_gib` has the names of all."""

    def __init__(self, folder: Path) -> None:
        libraries = Cards(folder=folder).environment()["LD_LIBRARY_PATH"]
        self._folder = folder
        self._process = subprocess.Popen(
            [FOLDER / "venv/bin/python", "-m", "tests.card.corpus.driver"],
            cwd=ROOT,
            env={**os.environ, "LD_LIBRARY_PATH": libraries, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.card_gib: dict[str, int] = json.loads(self._read())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def record(self, name: str) -> bytes:
        """Return the trace of a day; raises RuntimeError where it failed, and its log says why."""
        cards = Cards(folder=self._folder, total_bytes=self.card_gib[name] * GIB).create()
        out = self._folder / "trace.jsonl"
        self._write(json.dumps([name, cards.environment(), str(out)]))
        if error := self._read():
            raise RuntimeError(f"{name}: {error}")
        return out.read_bytes()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def keep(name: str, written: bytes, into: Path) -> str:
    """Write a trace, compressed; return a line about it. A day without a leak that runs out of memory is none."""
    truth = json.loads(written.split(b"\n", 1)[0])["truth"]
    if truth["oom_at"] is not None and not truth["leak"]:
        return f"not kept, it ran out of memory: {truth['error'][:120]}"
    packed = lzma.compress(written, preset=PRESET)
    (into / f"{name}.jsonl.xz").write_bytes(packed)
    ending = "" if truth["oom_at"] is None else ", out of memory"
    samples = len(written.splitlines()) - 1
    return f"{samples} samples, {len(packed):,} bytes, {truth['retries']} retries{ending}"


def main() -> None:
    """Record the named days, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--into", type=Path, default=TRACES)
    arguments = parser.parse_args()
    arguments.into.mkdir(exist_ok=True)
    with ExitStack() as stack:
        idle: SimpleQueue[Driver] = SimpleQueue()
        for _ in range(arguments.jobs):
            driver = stack.enter_context(Driver(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
            idle.put(driver)

        def record(name: str) -> None:
            began, free = time.monotonic(), idle.get()
            try:
                outcome = keep(name, free.record(name), arguments.into)
            except RuntimeError as error:
                outcome = str(error)
            idle.put(free)
            sys.stdout.write(f"{name}: {outcome}, {time.monotonic() - began:.0f} s\n")
            sys.stdout.flush()

        with ThreadPoolExecutor(arguments.jobs) as pool:
            list(pool.map(record, arguments.names or list(driver.card_gib)))


if __name__ == "__main__":
    main()
