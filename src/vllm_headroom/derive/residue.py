"""The memory that an engine keeps while it sleeps."""

from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.pages import is_page_awake
from vllm_headroom.derive.run_identity import identify_run, is_new_run
from vllm_headroom.derive.series import label_gpu, limit_remembered
from vllm_headroom.model import Sample, Snapshot

FREEING_SECONDS: Final = 30.0
"""The engine may still be freeing memory for this long after the page reports sleep. On some
devices, this takes seconds (vllm-project/vllm#37533).
"""

LEAST_RELEASED_SHARE: Final = 0.1
"""If a sleep releases less than this share of the memory, no residue is reported. Sleep level 0,
for example, only pauses the scheduler.
"""


class SleepState(Struct, frozen=True, kw_only=True):
    """The newest sleep in a run, and the memory kept on each GPU."""

    run_id: str | None = None
    since_seconds: float | None = None
    """When the current sleep began, on the monotonic clock. It is None while the engine is awake.
    """

    settled: bool = False
    """Whether `least_bytes` is from the current sleep. If False, it is still from the previous
    sleep.
    """

    least_bytes: dict[str, int] = field(default_factory=dict)
    """The least memory that was held during one sleep, by the GPU's UUID. The minimum is used,
    because memory is freed only some time after the sleep starts. In addition, memory is taken
    again before the page reports that the engine is awake.
    """


def derive_sleep(state: SleepState, snapshot: Snapshot) -> tuple[SleepState, tuple[Sample, ...]]:
    """Return the residue on each GPU: the memory that the engine holds while asleep.

    Until the current sleep has settled, the previous sleep's residue is returned. There is no
    sample before the run's first sleep.
    """
    state = _update_sleep(state, snapshot)
    samples: list[Sample] = []
    for gpu in snapshot.owned_gpus:
        residue_bytes = state.least_bytes.get(gpu.reading.uuid)
        if residue_bytes is not None:
            samples.append(Sample(catalog.SLEEP_RESIDUE, label_gpu(gpu), float(residue_bytes)))
    return state, tuple(samples)


def _update_sleep(state: SleepState, snapshot: Snapshot) -> SleepState:
    """Return the state after one more snapshot.

    Without a page, the state does not change.
    """
    page = snapshot.page
    if page is None:
        return state
    run_id = identify_run(page)
    if is_new_run(state.run_id, run_id, None, None):
        state = SleepState(run_id=run_id)
    else:
        state = replace(state, run_id=state.run_id or run_id)
    # The engine is awake. The residue of the last sleep is kept until the next sleep has settled.
    if is_page_awake(page) is not False:
        return SleepState(run_id=state.run_id, least_bytes=state.least_bytes)

    now_seconds = snapshot.monotonic_seconds
    since_seconds = now_seconds if state.since_seconds is None else state.since_seconds
    # vLLM may still be releasing memory.
    if now_seconds - since_seconds < FREEING_SECONDS:
        return replace(state, since_seconds=since_seconds)
    residues_bytes = _list_residues(snapshot)
    if not residues_bytes:
        return state
    # The first settled sample replaces the residue of the previous sleep.
    least_bytes: dict[str, int] = {}
    if state.settled:
        least_bytes = limit_remembered(state.least_bytes, residues_bytes)
    for uuid, residue_bytes in residues_bytes.items():
        least_bytes[uuid] = min(residue_bytes, least_bytes.get(uuid, residue_bytes))
    return replace(state, settled=True, least_bytes=least_bytes)


def _list_residues(snapshot: Snapshot) -> dict[str, int]:
    """Return the memory now held on each GPU, by UUID.

    Only GPUs on which the sleep released enough are included. A GPU is also included if it is
    unknown how much was released there.
    """
    status = snapshot.engine_status
    bytes_to_wake = {} if status is None else dict(status.wake_bytes)
    residues_bytes: dict[str, int] = {}
    for gpu in snapshot.owned_gpus:
        if gpu.held_bytes is None:
            continue
        released_bytes = bytes_to_wake.get(gpu.reading.uuid, gpu.held_bytes)
        if released_bytes >= LEAST_RELEASED_SHARE * gpu.held_bytes:
            residues_bytes[gpu.reading.uuid] = gpu.held_bytes
    return residues_bytes
