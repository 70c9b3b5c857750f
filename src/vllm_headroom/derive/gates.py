"""Whether the engine should get traffic, and whether its pod should be evicted."""

from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from vllm_headroom import catalog
from vllm_headroom.derive.leak.leak import is_alone
from vllm_headroom.model import Sample, Snapshot, Values, name_device
from vllm_headroom.units import DAY_SECONDS, HOUR_SECONDS, format_duration
from vllm_headroom.vocabulary import EngineState, EvictionResult, LeakState

GATE: Final = "gate"
"""The name under which a failure to evaluate the gate is logged."""

HOST_NAME: Final = "the host"
"""The name of the host's memory in sentences."""


class Gate(Struct, frozen=True):
    """The answer at /gate/ready, and whether the pod should be evicted."""

    reason: str | None = None
    """Why the gate is closed, or None while it is open."""

    due: str | None = None
    """Why the pod should be evicted, or None while it should not."""


class Guardrail(Struct, frozen=True, kw_only=True):
    """The settings and the state of the guardrail.

    The guardrail evicts the pod of a leaking engine.
    """

    near_seconds: float
    """The pod is evicted if a leak may fill the memory within this time."""

    quiet_hour: int | None
    """The hour of the day in UTC, or None if no hour is set. In this hour, a leak that may fill
    memory within a day evicts the pod.
    """

    is_holder: bool
    """Whether this pod holds its workload's Lease. Only one pod at a time is evicted."""

    requests: tuple[tuple[EvictionResult, int], ...] = ()
    """How many evictions have been requested so far, by result."""


class TimeToOom(Struct, frozen=True, order=True):
    """A lower bound on the time until GPU or host memory is full.

    The shortest time sorts first.
    """

    earliest_seconds: float
    owner: str
    """The name of the GPU, or of the host, as it is used in sentences."""

    def __str__(self) -> str:
        """Return the end of a sentence whose subject is the owner."""
        return f"may be out of memory in {format_duration(self.earliest_seconds)}"


def derive_gate(
    snapshot: Snapshot,
    values: Values,
    gate_seconds: float | None,
    guardrail: Guardrail | None = None,
) -> tuple[Gate, tuple[Sample, ...]]:
    """Return the gate and its samples, computed from the `values` of this tick.

    The gate is closed while the engine is stalled. The gate is also closed if GPU or host memory
    may be full within `gate_seconds`. Memory closes the gate only while this pod holds its
    workload's Lease. Unknown values never close the gate. If `gate_seconds` is None, the gate is
    always open and has no series.
    """
    reason = None
    due = None
    samples = []
    if gate_seconds is not None:
        is_holder = guardrail is not None and guardrail.is_holder
        reason = _find_gate_reason(snapshot, values, gate_seconds, is_holder=is_holder)
        samples.append(Sample(catalog.GATE_OPEN, ("ready",), float(reason is None)))
    if guardrail is not None:
        due = _find_eviction_reason(snapshot, values, guardrail)
        for result, count in guardrail.requests:
            samples.append(Sample(catalog.EVICTION_REQUESTS, (result,), float(count)))
    return Gate(reason, due), tuple(samples)


def _find_gate_reason(
    snapshot: Snapshot, values: Values, gate_seconds: float, *, is_holder: bool
) -> str | None:
    """Return why the gate is closed, or None if it is open."""
    status = snapshot.engine_status
    if status is not None and status.state is EngineState.STALLED:
        return "the engine should make progress and makes none"
    # Closing the gates of all replicas at once would leave no replica to serve.
    if not is_holder:
        return None
    nearest = min(_list_times_to_oom(values), default=None)
    if nearest is None or nearest.earliest_seconds >= gate_seconds:
        return None
    return f"{nearest.owner} {nearest}"


def _find_eviction_reason(snapshot: Snapshot, values: Values, guardrail: Guardrail) -> str | None:
    """Return why the pod should be evicted, or None if it should not.

    The pod is evicted if its serving engine leaks and may soon exhaust memory.
    """
    status = snapshot.engine_status
    if status is None or status.state is not EngineState.SERVING:
        return None
    within_seconds = guardrail.near_seconds
    hour = snapshot.time_seconds % DAY_SECONDS // HOUR_SECONDS
    if hour == guardrail.quiet_hour:
        # The leak must not fill the memory before the next quiet hour. The next quiet hour is at
        # most a day away.
        within_seconds = DAY_SECONDS
    leaking = _list_leaking(snapshot, values)
    near = [
        time_to_oom
        for time_to_oom in _list_times_to_oom(values)
        if time_to_oom.owner in leaking and time_to_oom.earliest_seconds < within_seconds
    ]
    if not near:
        return None
    nearest = min(near)
    return f"{nearest.owner} leaks and {nearest}"


def _list_leaking(snapshot: Snapshot, values: Values) -> set[str]:
    """Return the GPUs and the host that are known to leak, named as in sentences.

    A GPU whose growth may come from another process is omitted. An eviction would not stop that
    growth.
    """
    shared_uuids = {gpu.reading.uuid for gpu in snapshot.devices if not is_alone(gpu)}
    names = set()
    for (gpu, uuid, leak_state), is_current in values.find_all(catalog.LEAK_STATE).items():
        if is_current and leak_state == LeakState.LEAKING and uuid not in shared_uuids:
            names.add(name_device(gpu, uuid))
    for (_role, leak_state), is_current in values.find_all(catalog.HOST_LEAK_STATE).items():
        if is_current and leak_state == LeakState.LEAKING:
            names.add(HOST_NAME)
    return names


def _list_times_to_oom(values: Values) -> Iterator[TimeToOom]:
    """Yield the lower bounds on the time to out-of-memory of each GPU and the host."""
    for (gpu, uuid), seconds in values.find_all(catalog.TIME_TO_OOM_LOWER).items():
        yield TimeToOom(seconds, name_device(gpu, uuid))
    for seconds in values.find_all(catalog.HOST_TIME_TO_OOM_LOWER).values():
        yield TimeToOom(seconds, HOST_NAME)
