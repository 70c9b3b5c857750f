"""What does the engine keep of each GPU while it sleeps?"""

from __future__ import annotations

from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.page_facts import awake, begun_anew, life
from vllm_headroom.derive.readings import gpu_labels, remembered
from vllm_headroom.model import Sample, Snapshot

SETTLED_SECONDS: Final = 30.0
"""Memory goes after the page says that the engine sleeps, on some cards seconds after (vllm-project/vllm#37533)."""

GIVEN_BACK: Final = 0.1
"""What gives back less than this share of what it keeps has no residue: level 0 pauses the scheduler and keeps all."""


class SleepState(Struct, frozen=True, kw_only=True):
    """Since when this life sleeps, on the monotonic clock, and the least it held of each GPU in its last sleep.

    `settled` is whether that is of the sleep that goes on. The least, because it has not let go of everything at the
    beginning, and takes up again before it says so.
    """

    life: str | None = None
    since_seconds: float | None = None
    settled: bool = False
    least_bytes: dict[str, int] = field(default_factory=dict)


def sleep(state: SleepState, snapshot: Snapshot) -> tuple[SleepState, tuple[Sample, ...]]:
    """Return the residue of each of the engine's GPUs: of this sleep once it has settled, or of the one before.

    Another life has not slept yet.
    """
    state = _followed(state, snapshot)
    samples = tuple(
        Sample(catalog.SLEEP_RESIDUE, gpu_labels(gpu), float(state.least_bytes[gpu.reading.uuid]))
        for gpu in snapshot.owned
        if gpu.reading.uuid in state.least_bytes
    )
    return state, samples


def _followed(state: SleepState, snapshot: Snapshot) -> SleepState:
    page = snapshot.page
    if page is None:
        return state
    now, named = snapshot.monotonic_seconds, life(page)
    anew = begun_anew(state.life, named, None, None)
    state = SleepState(life=named) if anew else replace(state, life=state.life or named)
    if awake(page) is not False:
        return SleepState(life=state.life, least_bytes=state.least_bytes)
    since = now if state.since_seconds is None else state.since_seconds
    if now - since < SETTLED_SECONDS:
        return replace(state, since_seconds=since)
    held = {gpu.reading.uuid: gpu.held_bytes for gpu in snapshot.owned if gpu.held_bytes is not None}
    to_wake = {} if snapshot.life is None else dict(snapshot.life.to_wake)
    held = {uuid: n_bytes for uuid, n_bytes in held.items() if to_wake.get(uuid, n_bytes) >= GIVEN_BACK * n_bytes}
    least = state.least_bytes if state.settled else {}
    least = remembered(least, held) | {uuid: min(n_bytes, least.get(uuid, n_bytes)) for uuid, n_bytes in held.items()}
    return replace(state, settled=state.settled or bool(held), least_bytes=least or state.least_bytes)
