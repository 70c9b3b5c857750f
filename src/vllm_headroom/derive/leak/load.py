"""Is load stable, and what did memory do since it has been?"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Final

from vllm_headroom import catalog
from vllm_headroom.derive.page_facts import named, together
from vllm_headroom.derive.readings import gpu_labels
from vllm_headroom.model import Sample, Snapshot
from vllm_headroom.model.changed import changed

MINUTE_SECONDS: Final = 60.0
WINDOW_MINUTES: Final = 10
"""The window of the plain rule this figure comes from, a post-mortem's alert on growth over 10 minutes."""

BAND: Final = 0.15
SLACK_REQUESTS: Final = 2.0
"""A minute's mean may differ from the window's by this share or these few requests: arrivals alone do that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadState:
    """Minute means of the requests in the engine (newest last), the minute being gathered and what memory was then.

    `stable_since` is None while load is not stable; `held_bytes` is, by UUID, what was held when it became stable.
    """

    minutes: tuple[float, ...] = ()
    began_seconds: float | None = None
    total: float = 0.0
    count: int = 0
    stable: bool | None = None
    held_bytes: dict[str, int] = field(default_factory=dict)


def load(state: LoadState, snapshot: Snapshot) -> tuple[LoadState, tuple[Sample, ...]]:
    """Return whether the requests in the engine stayed level for ten minutes, and each GPU's change since they have."""
    requests = _requests(snapshot)
    if requests is None:
        return LoadState(), ()
    state = _gathered(state, requests, snapshot.monotonic_seconds)
    if state.stable is None:
        return state, ()
    held = _held(snapshot) if state.stable else {}
    first = {uuid: state.held_bytes.get(uuid, now) for uuid, (_, now) in held.items()}
    if first != state.held_bytes:
        state = replace(state, held_bytes=first)
    deltas = [Sample(catalog.MEMORY_DELTA, labels, now - first[uuid]) for uuid, (labels, now) in held.items()]
    return state, (Sample(catalog.LOAD_STABLE, (), 1.0 if state.stable else 0.0), *deltas)


def _requests(snapshot: Snapshot) -> float | None:
    """Return requests running and waiting in all engines; None where one does not say how many run."""
    engines = () if snapshot.page is None else named(snapshot.page)
    running = together(engine.running for engine in engines)
    return None if running is None else running + sum(engine.waiting or 0.0 for engine in engines)


def _gathered(state: LoadState, requests: float, now: float) -> LoadState:
    began = now if state.began_seconds is None or now < state.began_seconds else state.began_seconds
    state = changed(state, began_seconds=began, total=state.total + requests, count=state.count + 1)
    if now - began < MINUTE_SECONDS:
        return state
    minutes = (*state.minutes, state.total / state.count)[-WINDOW_MINUTES:]
    stable = _level(minutes) if len(minutes) == WINDOW_MINUTES else None
    return replace(state, minutes=minutes, began_seconds=now, total=0.0, count=0, stable=stable)


def _level(minutes: tuple[float, ...]) -> bool:
    mean = fmean(minutes)
    return all(abs(minute - mean) <= max(BAND * mean, SLACK_REQUESTS) for minute in minutes)


def _held(snapshot: Snapshot) -> dict[str, tuple[tuple[str, str], int]]:
    held = ((gpu, gpu.held_bytes) for gpu in snapshot.devices)
    return {gpu.reading.uuid: (gpu_labels(gpu), held_bytes) for gpu, held_bytes in held if held_bytes is not None}
