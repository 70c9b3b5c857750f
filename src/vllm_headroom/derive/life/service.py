"""Lets the leak detector see only what belongs to a life of the engine that has worked and goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.readings import gpu_labels, states
from vllm_headroom.model import Failure, Sample, Snapshot
from vllm_headroom.vocabulary import EngineState, LeakState, Reason, Role, Source

_OUT_OF_SERVICE: Final = Failure(
    source=Source.ENGINE, reason=Reason.UNREACHABLE, message="the engine has not worked in this life, or its life ended"
)
_BEFORE_WORK: Final = {
    EngineState.STARTING: LeakState.WARMING_UP,
    EngineState.SERVING: LeakState.WARMING_UP,
    EngineState.ASLEEP: LeakState.ASLEEP,
}
"""What is said of a leak before an engine has worked, by what it does; in any other state nothing is known."""


def of_service(snapshot: Snapshot) -> Snapshot:
    """Return what belongs to a working life: of all else there is no page, no process and no held memory.

    While weights load, memory grows without bound and without work: a leak by all that a detector can tell. What is not
    known to belong to a working life is taken not to.
    """
    if snapshot.in_service:
        return snapshot
    gpus = snapshot.gpus
    if not isinstance(gpus, Failure):
        gpus = tuple(replace(gpu, held_bytes=None, engine_bytes=None, inside=None) for gpu in gpus)
    return replace(snapshot, engines=_OUT_OF_SERVICE, gpus=gpus, processes=())


def out_of_service(snapshot: Snapshot, samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
    """Return what the leak detector says of what is not in service: what state the engine is in, and no leak's."""
    life = snapshot.life
    engine = EngineState.UNKNOWN if life is None or life.in_service is None else life.state
    rest = (sample for sample in samples if sample.metric is not catalog.LEAK_STATE)
    return (*rest, *_states(snapshot, _BEFORE_WORK.get(engine, LeakState.UNKNOWN)))


def _states(snapshot: Snapshot, state: LeakState) -> Iterator[Sample]:
    for gpu in snapshot.owned:
        yield from states(catalog.LEAK_STATE, gpu_labels(gpu), LeakState.UNKNOWN if gpu.held_bytes is None else state)
    processes = () if isinstance(snapshot.processes, Failure) else snapshot.processes
    for role in sorted({process.role for process in processes}, key=list(Role).index):
        yield from states(catalog.HOST_LEAK_STATE, (str(role),), state)
