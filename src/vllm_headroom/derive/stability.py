"""Whether load is level, and each GPU's change of memory since then."""

from statistics import fmean
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.readings import label_gpu, list_named, sum_known
from vllm_headroom.model import Sample, Snapshot

MINUTE_SECONDS: Final = 60.0
WINDOW_MINUTES: Final = 10
"""The window of a simple rule in a post-mortem, an alert on growth over 10 minutes."""

BAND: Final = 0.15
SLACK_REQUESTS: Final = 2.0
"""A minute's mean may differ from the window's by this share or number: arrivals alone vary as much."""


class LoadState(Struct, frozen=True, kw_only=True):
    """Minute means of the requests in the engine (newest last), the current minute, and the memory held then.

    `held_bytes` is, by UUID, what was held when load became stable.
    """

    minutes: tuple[float, ...] = ()
    began_seconds: float | None = None
    total: float = 0.0
    count: int = 0
    stable: bool | None = None
    held_bytes: dict[str, int] = field(default_factory=dict)


def derive_load(state: LoadState, snapshot: Snapshot) -> tuple[LoadState, tuple[Sample, ...]]:
    """Return whether the engine's requests stayed level for ten minutes, and each GPU's change since then."""
    engines = () if snapshot.page is None else list_named(snapshot.page)
    running = sum_known(engine.running for engine in engines)
    if running is None:
        return LoadState(), ()
    requests = running + sum(engine.waiting or 0.0 for engine in engines)
    now = snapshot.monotonic_seconds
    began = now if state.began_seconds is None or now < state.began_seconds else state.began_seconds
    state = replace(state, began_seconds=began, total=state.total + requests, count=state.count + 1)
    if now - began >= MINUTE_SECONDS:
        minutes = (*state.minutes, state.total / state.count)[-WINDOW_MINUTES:]
        mean = fmean(minutes)
        level = all(abs(minute - mean) <= max(BAND * mean, SLACK_REQUESTS) for minute in minutes)
        stable = level if len(minutes) == WINDOW_MINUTES else None
        state = LoadState(
            minutes=minutes, began_seconds=now, stable=stable, held_bytes=state.held_bytes
        )
    if state.stable is None:
        return state, ()
    known = [(gpu, gpu.held_bytes) for gpu in snapshot.devices if state.stable]
    held = {
        gpu.reading.uuid: (label_gpu(gpu), n_bytes) for gpu, n_bytes in known if n_bytes is not None
    }
    first = {uuid: state.held_bytes.get(uuid, n_bytes) for uuid, (_, n_bytes) in held.items()}
    if first != state.held_bytes:
        state = replace(state, held_bytes=first)
    deltas = [
        Sample(catalog.MEMORY_DELTA, labels, n - first[uuid]) for uuid, (labels, n) in held.items()
    ]
    return state, (Sample(catalog.LOAD_STABLE, (), 1.0 if state.stable else 0.0), *deltas)
