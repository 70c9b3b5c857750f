"""Both gates together, each only where it is configured."""

from __future__ import annotations

from functools import partial

from msgspec import Struct, field

from vllm_headroom import catalog
from vllm_headroom.derive.derivation import Derivation
from vllm_headroom.derive.gates.live import Live, live
from vllm_headroom.derive.gates.ready import Ready, ready
from vllm_headroom.model import Sample, Snapshot, Values
from vllm_headroom.vocabulary import GateName

GATES = "gates"


class Gates(Struct, frozen=True, kw_only=True):
    """The state of both gates, open at first."""

    ready: Ready = field(default_factory=Ready)
    live: Live = field(default_factory=Live)

    def reason(self, name: GateName) -> str | None:
        """Return why a gate is closed, None while it is open."""
        return self.ready.reason if name is GateName.READY else self.live.reason


class Rules(Struct, frozen=True, kw_only=True):
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
    turn_seconds, dying, shut = rules.ready_most_seconds, state.live, state.ready
    if rules.live_seconds is not None:
        dying = live(
            dying,
            snapshot,
            values,
            least_between_seconds=rules.live_seconds,
            turn_seconds=turn_seconds,
            name=rules.name,
        )
    if rules.ready_seconds is not None:
        shut = ready(
            shut,
            snapshot,
            values,
            least_seconds=rules.ready_seconds,
            most_seconds=turn_seconds,
            name=rules.name,
            ending=dying.reason,
        )
    state = Gates(ready=shut, live=dying)
    configured = {GateName.LIVE: rules.live_seconds, GateName.READY: rules.ready_seconds}
    return state, tuple(
        Sample(catalog.GATE_OPEN, (str(name),), float(state.reason(name) is None))
        for name, seconds in configured.items()
        if seconds is not None
    )
