"""A plugin of vLLM's that leaks host memory on purpose, by a known amount; run by the Python that vLLM is installed in.

LEAKS says how: `engine_core=requests worker=lumps`. Each process writes what it keeps, and since when, to a file of its
role in the folder LEAKED. LEAKED_BYTES_PER_SECOND is how fast a leak by `time` is.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BYTES_PER_REQUEST = 12_800
"""12.8 MB per thousand requests: vLLM's best known leak on a GPU."""
REQUESTS_PER_LUMP = 1000
BYTES_PER_SECOND = int(os.environ.get("LEAKED_BYTES_PER_SECOND", "128000"))
"""By itself what ten requests a second would leak."""
TOLD_EVERY_SECONDS = 15.0


class Leak:
    """What one process leaks, from its first request on."""

    def __init__(self, role: str, way: str) -> None:
        self._way = way
        self._file = Path(os.environ["LEAKED"]) / f"{role}.jsonl"
        self._kept: list[bytes] = []
        self._bytes = self._requests = 0
        self._told_seconds = 0.0
        if way == "time":
            threading.Thread(target=self._by_time, daemon=True).start()

    def count(self, requests: int) -> None:
        """Take note of requests that have come in."""
        for _ in range(requests):
            self._requests += 1
            if self._way == "requests":
                self._keep(BYTES_PER_REQUEST)
            elif self._way == "lumps" and self._requests % REQUESTS_PER_LUMP == 0:
                self._keep(BYTES_PER_REQUEST * REQUESTS_PER_LUMP)

    def _by_time(self) -> None:
        began = time.monotonic()
        while True:
            time.sleep(1)
            self._keep(int((time.monotonic() - began) * BYTES_PER_SECOND) - self._bytes)

    def _keep(self, count: int) -> None:
        self._kept.append(b"\x01" * count)  # not zeros: memory that nothing was written to is not resident
        self._bytes += count
        if time.time() - self._told_seconds >= TOLD_EVERY_SECONDS:
            self._told_seconds = time.time()
            with self._file.open("a") as stream:
                stream.write(json.dumps({"t": self._told_seconds, "bytes": self._bytes, "requests": self._requests}))
                stream.write("\n")


def register() -> None:
    """Make the processes that LEAKS names leak; vLLM calls this once in each of its processes."""
    ways = dict(pair.split("=") for pair in os.environ.get("LEAKS", "").split())
    if "engine_core" in ways:
        from vllm.v1.engine.core import EngineCore  # noqa: PLC0415 - slow, and not needed in each process

        _count(EngineCore, "add_request", "engine_core", ways["engine_core"], lambda *_: 1)
    if "worker" in ways:
        from vllm.v1.worker.worker_base import WorkerWrapperBase  # noqa: PLC0415 - as above

        _count(
            WorkerWrapperBase, "execute_model", "worker", ways["worker"], lambda steps: len(steps.scheduled_new_reqs)
        )


def _count(owner: Any, method: str, role: str, way: str, requests: Callable[..., int]) -> None:
    """Count the requests that a method is notified of; the leak begins with the first, in the process that has it."""
    original = getattr(owner, method)
    leaks: list[Leak] = []

    def counting(self: Any, first_argument: Any, *arguments: Any, **named: Any) -> Any:
        if not leaks:
            leaks.append(Leak(role, way))
        leaks[0].count(requests(first_argument))
        return original(self, first_argument, *arguments, **named)

    setattr(owner, method, counting)
