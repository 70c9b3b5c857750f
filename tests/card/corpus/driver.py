"""Record days of engines on stand-in cards: each a process, beside one that reads NVML by the day's clock.

Prints the size in GiB of each day's card. Then each line of its standard input is a day: its name, the environment
that tests/card/card.py gives, and the file to write; its answer is a line with the error, empty without one.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import zlib
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import pynvml

from tests.card.corpus import memory
from tests.card.corpus.day import Day
from tests.card.corpus.days import DAYS
from tests.card.corpus.engine import Engine
from tests.card.corpus.neighbour import Neighbour
from tests.card.corpus.traffic import HOUR

STARTED: Final = 1_760_000_000
LONGEST_TICK: Final = 10.0
DOWN_SECONDS: Final = 40.0
"""Between the end of an engine and the start of the next."""

fork = multiprocessing.get_context("fork")
"""torch is imported once; CUDA begins in the children."""


class Process:
    """A child on the card, which does as instructed, tick by tick."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._pipe, theirs = fork.Pipe()
        self._child = fork.Process(target=_obey, args=(theirs, make), daemon=True)
        self._child.start()
        theirs.close()
        self.pid = self._child.pid

    def step(self, seconds: float, length: float) -> dict[str, Any]:
        """Let it live for some seconds, and return what it says."""
        self._pipe.send((seconds, length))
        answer: dict[str, Any] = self._pipe.recv()
        return answer

    def kill(self) -> None:
        """End it as the kernel would."""
        if self.pid is not None and self._child.is_alive():
            os.kill(self.pid, signal.SIGKILL)
        self._child.join()


def _obey(pipe: Connection, make: Callable[[], Any]) -> None:
    process = make()
    while True:
        seconds, length = pipe.recv()
        try:
            page = process.step(seconds, length)
        except memory.OUT_OF_MEMORY as error:
            pipe.send({"error": str(error), "lost": process.lost, "retries": memory.read_retries()})
            return
        engine_fields = {"inside": process.inside, "lost": process.lost} if isinstance(process, Engine) else {}
        pipe.send({"page": page, "retries": memory.read_retries(), **engine_fields})


class Recorder:
    """One day: its processes, the samples so far and their truth."""

    def __init__(self, name: str, day: Day) -> None:
        self._name, self._day, self._seed = name, day, zlib.crc32(name.encode())
        pynvml.nvmlInit()
        self._card = pynvml.nvmlDeviceGetHandleByIndex(0)
        self._engine: Process | None = None
        self._neighbour: Process | None = None
        self._runs, self._began, self._retries = 0, 0.0, 0
        self._samples: list[dict[str, Any]] = []
        self._lost: list[int] = []
        self._end: dict[str, Any] = {}

    def record(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the truth and the samples."""
        length = min(self._day.interval, LONGEST_TICK)
        for number in range(int(self._day.hours * HOUR / length)):
            seconds = number * length
            self._begin_and_end(seconds)
            stepped = self._step(seconds, length)
            if "error" in stepped:
                self._end = {"oom_at": STARTED + seconds, "error": stepped["error"]}
                break
            if seconds % self._day.interval == 0:
                self._samples.append(self._sample(seconds, stepped))
            if seconds % 60 == 0:
                self._lost.append(stepped.get("lost", 0))
        for process in (self._engine, self._neighbour):
            if process is not None:
                process.kill()
        return self._truth(), self._samples

    def _begin_and_end(self, seconds: float) -> None:
        neighbour_plan = self._day.neighbour
        if neighbour_plan is not None and self._neighbour is None and seconds == neighbour_plan.comes * HOUR:
            self._neighbour = Process(partial(Neighbour, neighbour_plan, self._seed, seconds))
            self._neighbour.step(seconds, 0.0)
        if (
            self._neighbour is not None
            and neighbour_plan is not None
            and neighbour_plan.goes
            and seconds == neighbour_plan.goes * HOUR
        ):
            self._neighbour.kill()
        if any(seconds == hour * HOUR for hour in self._day.restarts) and self._engine is not None:
            self._engine.kill()
            self._engine, self._began = None, seconds + DOWN_SECONDS
        if self._engine is None and seconds >= self._began:
            self._engine = Process(partial(Engine, self._day, self._seed, self._runs, seconds))
            self._runs, self._began = self._runs + 1, seconds

    def _step(self, seconds: float, length: float) -> dict[str, Any]:
        neighbour_plan = self._day.neighbour
        if (
            self._neighbour is not None
            and neighbour_plan is not None
            and not (neighbour_plan.goes and seconds >= neighbour_plan.goes * HOUR)
        ):
            self._neighbour.step(seconds, length)
        stepped = {} if self._engine is None else self._engine.step(seconds, length)
        self._retries = stepped.get("retries", self._retries)
        return stepped

    def _sample(self, seconds: float, document: dict[str, Any]) -> dict[str, Any]:
        holders = {
            process.pid: process.usedGpuMemory for process in pynvml.nvmlDeviceGetComputeRunningProcesses(self._card)
        }
        card = pynvml.nvmlDeviceGetMemoryInfo(self._card, version=pynvml.nvmlMemory_v2)
        engine = 0 if self._engine is None else holders.get(self._engine.pid, 0)
        gpu = {
            "gpu": 0,
            "uuid": pynvml.nvmlDeviceGetUUID(self._card),
            "total": card.total,
            "used": card.used,
            "reserved": card.reserved,
            "engine": engine,
            "other": sum(holders.values()) - engine,
            "processes": len(holders),
        }
        page = document.get("page")
        engine_fields = {"model_name": self._day.model, "engine": "0", "started_at": STARTED + int(self._began)}
        return {
            "t": STARTED + int(seconds) if seconds == int(seconds) else STARTED + seconds,
            "gpus": [gpu if self._day.sleep else gpu | document.get("inside", {})],
            "engines": None if page is None else [engine_fields | page],
        }

    def _truth(self) -> dict[str, Any]:
        day = self._day
        leak = day.leak
        onset = 0.0 if leak is None else HOUR * leak.keywords.get("onset_hours", 0.0)
        return {
            "scenario": self._name,
            "seed": 0,
            "origin": day.origin,
            "group": day.group,
            "leak": leak is not None,
            "ambiguous": day.ambiguous,
            "series": "gpu",
            "location": None if leak is None or day.sleep else getattr(leak.func, "location", None),
            "steady": leak is not None and day.load == "level" and day.group == "even" and not day.restarts,
            "room_bytes": day.room_mib * 2**20,
            "allocator": day.allocator,
            "retries": self._retries,
            "onset": STARTED + onset,
            "started": STARTED,
            "ends": self._samples[-1]["t"],
            "oom_at": None,
            **self._end,
            "t": [STARTED + 60 * minute for minute in range(len(self._lost))] if leak is not None else [STARTED],
            "leaked_bytes": self._lost if leak is not None else [0],
        }


def record(name: str, environment: dict[str, str], out: str) -> None:
    """Write the trace of a day; its truth is in the header."""
    os.environ.update(environment)
    truth, samples = Recorder(name, DAYS[name]).record()
    lines = [{"headroom_trace": 1, "truth": truth}, *samples]
    Path(out).write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def main() -> None:
    """Record days, each in a separate process, until the input ends."""
    print(json.dumps({name: day.card_gib for name, day in DAYS.items()}), flush=True)  # noqa: T201 - the protocol
    for line in sys.stdin:
        day = fork.Process(target=record, args=json.loads(line))
        day.start()
        day.join()
        print(f"exit status {day.exitcode}" if day.exitcode else "", flush=True)  # noqa: T201 - the protocol


if __name__ == "__main__":
    main()
