"""Memory and load over a trace, thinned out for drawing."""

from __future__ import annotations

from typing import Final

from vllm_headroom.derive.page_facts import running_requests
from vllm_headroom.expose.drawing import Point
from vllm_headroom.model import Failure, Snapshot

MARGIN: Final = 0.05


class Curves:
    """Collects what is drawn: the memory free and the memory held by the engine on each GPU, and the running requests.

    `free` is empty of values in a trace that does not tell how large the GPUs are.
    """

    def __init__(self) -> None:
        self.free: dict[str, list[Point]] = {}
        self.held: dict[str, list[Point]] = {}
        self.running: list[Point] = []

    def step(self, snapshot: Snapshot) -> None:
        """Add one sample; a GPU that is missing from it could not be read."""
        now, page = snapshot.time_seconds, snapshot.engines
        gpus = {gpu.reading.uuid: gpu for gpu in (() if isinstance(snapshot.gpus, Failure) else snapshot.gpus)}
        for uuid in {**self.held, **gpus}:
            gpu = gpus.get(uuid)
            memory = None if gpu is None else gpu.reading.memory
            self.free.setdefault(uuid, []).append((now, None if memory is None else memory.free_bytes))
            self.held.setdefault(uuid, []).append((now, None if gpu is None else gpu.held_bytes))
        self.running.append((now, None if isinstance(page, Failure) else running_requests(page)))
