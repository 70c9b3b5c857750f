"""Whether traffic should stay away from the engine, the answer of /gate/ready, and whether its pod is to be evicted."""

from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from vllm_headroom import catalog
from vllm_headroom.derive import Derivation
from vllm_headroom.model import Sample, Snapshot, Values, name_device
from vllm_headroom.units import format_duration
from vllm_headroom.vocabulary import EngineState, EvictionResult, LeakState

GATE: Final = "gate"

DAY_SECONDS: Final = 86400.0
"""From one quiet hour to the next."""

HOST: Final = "the host"


class Gate(Struct, frozen=True):
    """Why the gate is closed, None while it is open; why the pod is to be evicted, None while it is not."""

    reason: str | None = None
    due: str | None = None


class Guardrail(Struct, frozen=True, kw_only=True):
    """The guardrail's settings and state: `is_holder` while this pod holds the Lease of its workload."""

    near_seconds: float
    quiet_hour: int | None
    is_holder: bool
    requests: tuple[tuple[EvictionResult, int], ...] = ()


def build_gate(
    least_seconds: float | None, values: Values, guardrail: Guardrail | None = None
) -> Derivation[Gate]:
    """Build the derivation of the gate, which runs after all others have filled `values`.

    The gate closes where the engine is stalled, and, for the holder of the Lease alone, where it may be out of memory
    within `least_seconds`, by the lower bound. Unknown values never close it; without configuration it is always open.
    """

    def step(_: Gate, snapshot: Snapshot) -> tuple[Gate, tuple[Sample, ...]]:
        reason, due, samples = None, None, []
        if least_seconds is not None:
            is_holder = guardrail is not None and guardrail.is_holder
            within = least_seconds if is_holder else 0.0
            left, whose = min(_list_times(values), default=(within, ""))
            reason = (
                f"{whose} may be out of memory in {format_duration(left)}"
                if left < within
                else None
            )
            if (
                snapshot.engine_status is not None
                and snapshot.engine_status.state is EngineState.STALLED
            ):
                reason = "the engine should make progress and makes none"
            samples.append(Sample(catalog.GATE_OPEN, ("ready",), float(reason is None)))
        if guardrail is not None:
            due = _find_leak(values, snapshot, guardrail)
            samples += [
                Sample(catalog.EVICTION_REQUESTS, (result,), float(n))
                for result, n in guardrail.requests
            ]
        return Gate(reason, due), tuple(samples)

    return Derivation(name=GATE, initial=Gate(), step=step)


def _find_leak(values: Values, snapshot: Snapshot, guardrail: Guardrail) -> str | None:
    """Return why the pod is to be evicted: a leak that is sure, of an engine that serves, and little time."""
    if snapshot.engine_status is None or snapshot.engine_status.state is not EngineState.SERVING:
        return None
    leaking = {
        name_device(*labels[:-1]) if metric is catalog.LEAK_STATE else HOST
        for metric in (catalog.LEAK_STATE, catalog.HOST_LEAK_STATE)
        for labels, held in values.find_all(metric).items()
        if held and labels[-1] == LeakState.LEAKING
    }
    is_quiet = snapshot.time_seconds % DAY_SECONDS // 3600 == guardrail.quiet_hour
    within_seconds = DAY_SECONDS if is_quiet else guardrail.near_seconds
    near = [each for each in _list_times(values) if each[1] in leaking and each[0] < within_seconds]
    return (
        f"{min(near)[1]} leaks and may be out of memory in {format_duration(min(near)[0])}"
        if near
        else None
    )


def _list_times(values: Values) -> Iterator[tuple[float, str]]:
    """Yield the lower bounds of the time to out-of-memory, and whose each is."""
    for gpu, left in values.find_all(catalog.TIME_TO_OOM_LOWER).items():
        yield left, name_device(*gpu)
    for left in values.find_all(catalog.HOST_TIME_TO_OOM_LOWER).values():
        yield left, HOST
