"""Whether traffic should stay away from the engine: the answer of /gate/ready."""

from __future__ import annotations

from functools import partial
from typing import Final

from msgspec import Struct

from vllm_headroom import catalog
from vllm_headroom.derive import Derivation
from vllm_headroom.model import Sample, Snapshot, Values, name_device
from vllm_headroom.units import format_duration
from vllm_headroom.vocabulary import EngineState

GATE: Final = "gate"

WIDER: Final = 1.5
"""A closed gate opens when half as much time again is left as closed it."""


class Gate(Struct, frozen=True):
    """Why the gate is closed, None while it is open."""

    reason: str | None = None


def build_gate(least_seconds: float | None, values: Values) -> Derivation[Gate]:
    """Build the derivation of the gate, which runs after all others have filled `values`.

    It closes where the engine may be out of memory within `least_seconds`, by the lower bound, and where it is stalled.
    Unknown values never close it; without configuration it is always open.
    """
    return Derivation(name=GATE, initial=Gate(), step=partial(_step, least_seconds, values))


def _step(
    least_seconds: float | None, values: Values, gate: Gate, snapshot: Snapshot
) -> tuple[Gate, tuple[Sample, ...]]:
    if least_seconds is None:
        return gate, ()
    reason = _find_danger(values, snapshot, least_seconds * (1.0 if gate.reason is None else WIDER))
    return Gate(reason), (Sample(catalog.GATE_OPEN, ("ready",), float(reason is None)),)


def _find_danger(values: Values, snapshot: Snapshot, least_seconds: float) -> str | None:
    if snapshot.life is not None and snapshot.life.state is EngineState.STALLED:
        return "the engine should make progress and makes none"
    times = [(left, name_device(*gpu)) for gpu, left in values.of(catalog.TIME_TO_OOM_LOWER).items()]
    times += [(left, "the host") for left in values.of(catalog.HOST_TIME_TO_OOM_LOWER).values()]
    left, whose = min(times, default=(least_seconds, ""))
    return f"{whose} may be out of memory in {format_duration(left)}" if left < least_seconds else None
