"""What changed over a trace, in order."""

from __future__ import annotations

from collections import deque
from typing import Final

from vllm_headroom.commands.postmortem.known import Known, records
from vllm_headroom.model import GpuReading, Snapshot, called
from vllm_headroom.trace.parse import YEAR_10000
from vllm_headroom.trace.replay import Watch
from vllm_headroom.units import GIB, size
from vllm_headroom.vocabulary import EngineState, LeakState

MOST: Final = 40
"""What a person reads; the newest stay."""

Moment = tuple[float, str]

STATES: Final = {
    EngineState.UNKNOWN: "the engine may be up or down, that is not known",
    EngineState.DOWN: "the engine is down",
    EngineState.STARTING: "the engine is starting",
    EngineState.SERVING: "the engine serves",
    EngineState.STALLED: "the engine is stalled: nothing moves",
    EngineState.ASLEEP: "the engine sleeps",
}


class Timeline:
    """Notes what the engine did, what the leak detector said, and when others came to its GPUs."""

    def __init__(self) -> None:
        self._moments: deque[Moment] = deque(maxlen=MOST)
        self._state: EngineState | None = None
        self._leaks: dict[str, LeakState] = {}
        self._others: dict[str, int] = {}

    def step(self, snapshot: Snapshot, watch: Watch) -> None:
        """Take note of the next sample, with what is known of the engine's life and of its leaks then."""
        now, life = snapshot.time_seconds, snapshot.life
        if life is not None:
            if life.ended is not None:
                self._moments.append((now, "a life of the engine ended"))
            if life.state is not self._state:
                first = "the record begins: " if self._state is None else ""
                self._moments.append((now, f"{first}{STATES[life.state]}"))
            self._state = life.state
        for index, uuid, course in watch.gpus:
            if course.state in (LeakState.GROWING, LeakState.LEAKING) and self._leaks.get(uuid) is not course.state:
                verb = "leaks" if course.state is LeakState.LEAKING else "may leak"
                self._moments.append((now, f"by this record {called(index, uuid)} {verb}"))
            self._leaks[uuid] = course.state
        for gpu in snapshot.owned:
            if gpu.other_bytes is not None:
                self._neighbour(now, gpu.reading, gpu.other_bytes)

    def moments(self, known: Known) -> tuple[Moment, ...]:
        """Return what happened, and among it the XIDs that the header tells of."""
        xids = [
            (float(each["t"]), f"the driver reported XID {each.get('xid')} on {each.get('uuid')}")
            for each in records(known, "xids")
            if isinstance(each.get("t"), int | float) and 0 <= each["t"] < YEAR_10000
        ]
        return tuple(sorted((*self._moments, *xids)))

    def _neighbour(self, now: float, gpu: GpuReading, other_bytes: int) -> None:
        before = self._others.setdefault(gpu.uuid, other_bytes)
        if abs(other_bytes - before) >= GIB:
            self._moments.append((now, f"others hold {size(other_bytes)} of {gpu.called}, {size(before)} before"))
            self._others[gpu.uuid] = other_bytes
