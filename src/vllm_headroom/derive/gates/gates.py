"""Both gates together, each only where it is configured."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from vllm_headroom import catalog
from vllm_headroom.derive.derivation import Derivation
from vllm_headroom.derive.gates.live import Live, live
from vllm_headroom.derive.gates.ready import Ready, ready
from vllm_headroom.model import Sample, Snapshot, Values
from vllm_headroom.vocabulary import GateName

GATES = "gates"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gates:
    """The state of both gates, open at first."""

    ready: Ready = field(default_factory=Ready)
    live: Live = field(default_factory=Live)

    def reason(self, name: GateName) -> str | None:
        """Return why a gate is closed, None while it is open."""
        return self.ready.reason if name is GateName.READY else self.live.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """When the gates close; None where a gate is not configured.

    `ready_seconds` is the time to out-of-memory that must be left, `ready_most_seconds` the longest that the gate is
    closed, `live_seconds` the least time from one restart to the next, `name` that of the replica.
    """

    ready_seconds: float | None
    ready_most_seconds: float
    live_seconds: float | None
    name: str


def gates(rules: Rules, values: Values) -> Derivation[Gates]:
    """Return the question of the gates, to be asked when all others have answered with `values`."""
    return Derivation(name=GATES, initial=Gates(), step=partial(_step, rules, values))


def _step(rules: Rules, values: Values, state: Gates, snapshot: Snapshot) -> tuple[Gates, tuple[Sample, ...]]:
    if rules.ready_seconds is None and rules.live_seconds is None:
        return state, ()
    configured = []
    if rules.live_seconds is not None:
        dying = live(
            state.live,
            snapshot,
            values,
            least_between_seconds=rules.live_seconds,
            turn_seconds=rules.ready_most_seconds,
            name=rules.name,
        )
        state = replace(state, live=dying)
        configured.append(GateName.LIVE)
    if rules.ready_seconds is not None:
        least, most = rules.ready_seconds, rules.ready_most_seconds
        shut = ready(
            state.ready,
            snapshot,
            values,
            least_seconds=least,
            most_seconds=most,
            name=rules.name,
            ending=state.live.reason,
        )
        state = replace(state, ready=shut)
        configured.append(GateName.READY)
    return state, tuple(
        Sample(catalog.GATE_OPEN, (str(name),), float(state.reason(name) is None)) for name in configured
    )
