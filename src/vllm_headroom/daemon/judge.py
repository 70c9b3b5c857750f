"""Judge a tick: the gate of /gate/ready, and the verdicts."""

from collections.abc import Callable

from msgspec import Struct

from vllm_headroom.derive.gates import Gate, Guardrail, derive_gate
from vllm_headroom.derive.leak.leak import LeakMemory
from vllm_headroom.derive.verdicts import SERVING, derive_verdicts, measure_watches
from vllm_headroom.model import Sample, Snapshot, Values, Verdict


class Judge(Struct, frozen=True, kw_only=True):
    """Judges each tick by what the operator configured."""

    role: str = SERVING
    gate_ready_seconds: float | None = None
    """The gate closes with less time to out-of-memory; None where it is not configured."""
    read_guardrail: Callable[[], Guardrail] | None = None
    """None where this pod is never evicted."""

    def judge_gate(self, snapshot: Snapshot, values: Values) -> tuple[Gate, tuple[Sample, ...]]:
        """Return the gate and its samples; `values` has the samples of all derivations."""
        guardrail = None if self.read_guardrail is None else self.read_guardrail()
        return derive_gate(snapshot, values, self.gate_ready_seconds, guardrail)

    def judge_verdicts(
        self, snapshot: Snapshot, values: Values, leak_memory: LeakMemory
    ) -> tuple[tuple[Verdict, ...], tuple[Sample, ...]]:
        """Return the verdicts and their samples; `values` has the gate's samples too."""
        return derive_verdicts(snapshot, values, measure_watches(leak_memory), self.role)
