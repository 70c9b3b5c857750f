"""Memory and load over a trace, to be drawn."""

from __future__ import annotations

from array import array
from math import isnan, nan

from vllm_headroom.derive.readings import running_requests
from vllm_headroom.expose.drawing import Point
from vllm_headroom.model import Snapshot


class Curves:
    """Collects the memory free and the memory held by the engine on each GPU, and the running requests.

    A sample takes eight bytes of each curve, since a trace may be of weeks; NaN is what could not be read. A GPU's
    curves begin with the first sample that has it.
    """

    def __init__(self) -> None:
        self._times = array("d")
        self._free: dict[str, array[float]] = {}
        self._held: dict[str, array[float]] = {}
        self._running = array("d")

    @property
    def uuids(self) -> tuple[str, ...]:
        """The GPUs, in the order in which they came."""
        return tuple(self._free)

    @property
    def running(self) -> list[Point]:
        """The running requests."""
        return self._points(self._running)

    def free(self, uuid: str) -> list[Point]:
        """Return what was free on a GPU; without values in a trace that does not tell how large the GPUs are."""
        return self._points(self._free[uuid])

    def held(self, uuid: str) -> list[Point]:
        """Return what the engine held of a GPU."""
        return self._points(self._held[uuid])

    def step(self, snapshot: Snapshot) -> None:
        """Add one sample; a GPU that is missing from it could not be read."""
        gpus = {gpu.reading.uuid: gpu for gpu in snapshot.devices}
        for uuid in {**self._held, **gpus}:
            gpu = gpus.get(uuid)
            memory = None if gpu is None else gpu.reading.memory
            _add(self._free.setdefault(uuid, array("d")), None if memory is None else memory.free_bytes)
            _add(self._held.setdefault(uuid, array("d")), None if gpu is None else gpu.held_bytes)
        _add(self._running, running_requests(snapshot.page))
        self._times.append(snapshot.time_seconds)

    def _points(self, values: array[float]) -> list[Point]:
        times = self._times[len(self._times) - len(values) :]
        return [(seconds, None if isnan(value) else value) for seconds, value in zip(times, values, strict=True)]


def _add(curve: array[float], value: float | None) -> None:
    curve.append(nan if value is None else value)
