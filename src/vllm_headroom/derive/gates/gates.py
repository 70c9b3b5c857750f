"""Both gates together, each only where it is configured."""

from __future__ import annotations

from functools import partial

from msgspec import Struct, field

from vllm_headroom import catalog
from vllm_headroom.derive.derivation import Derivation
from vllm_headroom.derive.gates.live import Live, live
from vllm_headroom.derive.gates.ready import Ready, ready
from vllm_headroom.derive.gates.rules import Rules
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


def gates(rules: Rules, values: Values) -> Derivation[Gates]:
    """Return the question of the gates, to be asked when all others have answered with `values`."""
    return Derivation(name=GATES, initial=Gates(), step=partial(_step, rules, values))


def _step(rules: Rules, values: Values, state: Gates, snapshot: Snapshot) -> tuple[Gates, tuple[Sample, ...]]:
    dying = live(state.live, snapshot, values, rules)
    state = Gates(ready=ready(state.ready, snapshot, values, rules, ending=dying.reason), live=dying)
    configured = {GateName.LIVE: rules.live_seconds, GateName.READY: rules.ready_seconds}
    return state, tuple(
        Sample(catalog.GATE_OPEN, (str(name),), float(state.reason(name) is None))
        for name, seconds in configured.items()
        if seconds is not None
    )
