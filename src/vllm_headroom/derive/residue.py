"""The memory that an engine keeps in sleep."""

from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.readings import (
    identify_run,
    is_new_run,
    is_page_awake,
    label_gpu,
    limit_remembered,
)
from vllm_headroom.model import Sample, Snapshot

SETTLED_SECONDS: Final = 30.0
"""Memory is freed after the page reports sleep, on some devices seconds later (vllm-project/vllm#37533)."""

GIVEN_BACK: Final = 0.1
"""Below this share given back there is no residue: sleep level 0 pauses the scheduler and keeps all memory."""


class SleepState(Struct, frozen=True, kw_only=True):
    """Since when this run sleeps, on the monotonic clock, and the least it held of each GPU in its last sleep.

    `settled` is whether that is the current sleep. The least counts, because memory is freed late in the beginning, and
    taken again before the page reports the wake.
    """

    run_id: str | None = field(default=None, name="life")  # its name in the state file
    since_seconds: float | None = None
    settled: bool = False
    least_bytes: dict[str, int] = field(default_factory=dict)


def derive_sleep(state: SleepState, snapshot: Snapshot) -> tuple[SleepState, tuple[Sample, ...]]:
    """Return the residue of each of the engine's GPUs: of this sleep once settled, else of the previous one.

    A new run has not slept yet.
    """
    state = _update_sleep(state, snapshot)
    kept = (
        (label_gpu(gpu), state.least_bytes.get(gpu.reading.uuid)) for gpu in snapshot.owned_gpus
    )
    return state, tuple(
        Sample(catalog.SLEEP_RESIDUE, labels, float(n)) for labels, n in kept if n is not None
    )


def _update_sleep(state: SleepState, snapshot: Snapshot) -> SleepState:
    page = snapshot.page
    if page is None:
        return state
    now, named = snapshot.monotonic_seconds, identify_run(page)
    is_new = is_new_run(state.run_id, named, None, None)
    state = SleepState(run_id=named) if is_new else replace(state, run_id=state.run_id or named)
    if is_page_awake(page) is not False:
        return SleepState(run_id=state.run_id, least_bytes=state.least_bytes)
    since = now if state.since_seconds is None else state.since_seconds
    if now - since < SETTLED_SECONDS:
        return replace(state, since_seconds=since)
    held = {
        gpu.reading.uuid: gpu.held_bytes
        for gpu in snapshot.owned_gpus
        if gpu.held_bytes is not None
    }
    to_wake = {} if snapshot.engine_status is None else dict(snapshot.engine_status.to_wake)
    held = {
        uuid: n_bytes
        for uuid, n_bytes in held.items()
        if to_wake.get(uuid, n_bytes) >= GIVEN_BACK * n_bytes
    }
    least = state.least_bytes if state.settled else {}
    least = limit_remembered(least, held) | {
        uuid: min(n_bytes, least.get(uuid, n_bytes)) for uuid, n_bytes in held.items()
    }
    return replace(
        state, settled=state.settled or bool(held), least_bytes=least or state.least_bytes
    )
