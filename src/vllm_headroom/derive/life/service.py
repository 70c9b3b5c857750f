"""Lets a derivation see only what belongs to a life of the engine that has worked and goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, TypeVar

from vllm_headroom.model import Failure, Sample, Snapshot
from vllm_headroom.vocabulary import Reason, Source

State = TypeVar("State")
Step = Callable[[State, Snapshot], tuple[State, tuple[Sample, ...]]]

_OUT_OF_SERVICE: Final = Failure(
    source=Source.ENGINE, reason=Reason.UNREACHABLE, message="the engine has not worked in this life, or its life ended"
)


def in_service(step: Step[State]) -> Step[State]:
    """Return the step over what belongs to a working life: of all else it sees no page, no process and no held memory.

    While weights load, memory grows without bound and without work: a leak by all that a detector can tell.
    """
    return lambda state, snapshot: step(state, served(snapshot))


def served(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot without what does not belong to a life of the engine that has worked and goes on."""
    if snapshot.life is None or snapshot.life.in_service:
        return snapshot
    gpus = snapshot.gpus
    if not isinstance(gpus, Failure):
        gpus = tuple(replace(gpu, held_bytes=None, engine_bytes=None) for gpu in gpus)
    return replace(snapshot, engines=_OUT_OF_SERVICE, gpus=gpus, processes=())
