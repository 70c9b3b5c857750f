"""The type of a derivation."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Generic, TypeVar

from msgspec import Struct

from vllm_headroom.model import Sample, Snapshot

State = TypeVar("State")
StepFunction = Callable[[State, Snapshot], tuple[State, tuple[Sample, ...]]]


class Derivation(Struct, Generic[State], frozen=True, kw_only=True):
    """A question about every snapshot; `step` returns the next state and the samples."""

    name: str
    initial: State
    step: StepFunction[State]


def answer(derivation: Derivation[State], state: State, snapshot: Snapshot) -> tuple[State, tuple[Sample, ...]]:
    """Run one step and drop samples that are not finite: absurd values on a page divide to infinity."""
    following, samples = derivation.step(state, snapshot)
    return following, tuple([sample for sample in samples if isfinite(sample.value)])


def make_stateless(name: str, question: Callable[[Snapshot], tuple[Sample, ...]]) -> Derivation[None]:
    """Build a derivation that needs no state."""
    return Derivation(name=name, initial=None, step=lambda _, snapshot: (None, question(snapshot)))
