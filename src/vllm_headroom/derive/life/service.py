"""Selects the samples that count as evidence of a leak: those of a run that has done work."""

from typing import Final

from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.series import label_gpu, make_states
from vllm_headroom.model import Failure, Sample, Snapshot
from vllm_headroom.vocabulary import EngineState, LeakState, Reason, Role, Source

_OUT_OF_SERVICE: Final = Failure(
    source=Source.ENGINE,
    reason=Reason.UNREACHABLE,
    message="the engine has not worked in this run, or its run ended",
)

_STATES_BEFORE_WORK: Final = {
    EngineState.STARTING: LeakState.WARMING_UP,
    EngineState.SERVING: LeakState.WARMING_UP,
    EngineState.ASLEEP: LeakState.ASLEEP,
}
"""The leak state before an engine has worked, by the engine's state. In any other state it is
unknown.
"""


def keep_service(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot if the engine is in service, else one without evidence of a leak.

    A snapshot without evidence has no page, processes or held memory, because memory that grows
    while weights load looks like a leak. An engine of which it is unknown whether it is in service
    counts as out of service.
    """
    if snapshot.is_in_service:
        return snapshot
    gpus = snapshot.gpus
    if not isinstance(gpus, Failure):
        gpus = tuple(replace(gpu, held_bytes=None, engine_bytes=None, inside=None) for gpu in gpus)
    return replace(snapshot, engines=_OUT_OF_SERVICE, gpus=gpus, processes=())


def derive_out_of_service(snapshot: Snapshot, samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
    """Return the leak samples of an engine out of service.

    Its GPUs and roles have the leak state that belongs to the state of the engine, such as
    WARMING_UP while it starts.
    """
    status = snapshot.engine_status
    state = LeakState.UNKNOWN
    if status is not None and status.is_in_service is not None:
        state = _STATES_BEFORE_WORK.get(status.state, LeakState.UNKNOWN)
    # The detector does not judge an engine out of service: its states are replaced.
    derived = [sample for sample in samples if sample.metric is not catalog.LEAK_STATE]
    for gpu in snapshot.owned_gpus:
        # Where memory is unknown, the detector could not judge an engine in service either.
        gpu_state = LeakState.UNKNOWN if gpu.held_bytes is None else state
        derived += make_states(catalog.LEAK_STATE, label_gpu(gpu), gpu_state)
    roles = {process.role for process in snapshot.engine_processes}
    for role in sorted(roles, key=list(Role).index):
        derived += make_states(catalog.HOST_LEAK_STATE, (str(role),), state)
    return tuple(derived)
