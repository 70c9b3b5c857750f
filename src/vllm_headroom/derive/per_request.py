"""Does a running request cost more than it did at comparable load?"""

from __future__ import annotations

from math import log
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.readings import begun_anew, finished, gpu_labels, life, remembered, running_requests
from vllm_headroom.model import EnginePage, Failure, Sample, Snapshot

COMPARABLE: Final = 1.1
"""Loads within this factor are comparable: the alarm is at 1.1 (9.5 to 10.5 MB per request in the post-mortem)."""

READINGS: Final = 60
"""Readings that make a baseline, five minutes at the default interval: shorter ones catch a burst's high water."""

WARM_REQUESTS: Final = 1000.0
"""Requests finished in this life before a baseline is learned: first uses of kernels are over by then."""


HALF_LIFE_SECONDS: Final = 86_400.0
"""How fast the busiest load is forgotten: load comes back daily."""


class Baselines(Struct, frozen=True, kw_only=True):
    """Learned memory per GPU and load band: (readings so far, mean bytes held); for one life of the engine.

    `busiest` is the most requests that ran at once, and when, in seconds since the epoch.
    """

    life: str | None = None
    finished_total: float | None = None
    bands: dict[str, dict[int, tuple[int, float]]] = field(default_factory=dict)
    busiest: tuple[float, float] = (0.0, 0.0)


def baseline(
    state: Baselines, snapshot: Snapshot, *, configured_bytes: float | None
) -> tuple[Baselines, tuple[Sample, ...]]:
    """Return memory per running request over its baseline.

    With `configured_bytes` (per running request and GPU at full load) the ratio is to that, and there is one only while
    the engine is about as busy as it gets: at night the same memory is spread over fewer requests. Else it is to the
    mean of the first readings at comparable load, once there are enough of them; there is no sample while nothing runs.
    """
    page = snapshot.page
    if page is None or not snapshot.in_service or isinstance(snapshot.gpus, Failure):
        return state, ()
    state = _of_this_life(state, page)
    running = running_requests(page)
    if not running:
        return state, ()
    state = replace(state, busiest=_busiest(state.busiest, running, snapshot.time_seconds))
    band, warm = load_band(running), (finished(page) or 0.0) >= WARM_REQUESTS
    samples = []
    bands = remembered(state.bands, {gpu.reading.uuid for gpu in snapshot.gpus})
    for gpu in snapshot.gpus:
        if not gpu.held_bytes:  # unknown, or the engine died between the two readings
            continue
        if configured_bytes is not None:
            full = running * COMPARABLE >= _still(state.busiest, snapshot.time_seconds)
            ratio = gpu.held_bytes / running / configured_bytes if full else None
        else:
            mine = bands.get(gpu.reading.uuid, {})
            ratio = _ratio(mine.get(band), gpu.held_bytes)
            if warm:
                bands[gpu.reading.uuid] = {**mine, band: _learned(mine.get(band), gpu.held_bytes)}
        if ratio is not None:
            samples.append(Sample(catalog.MEMORY_PER_REQUEST_RATIO, gpu_labels(gpu), ratio))
    return replace(state, bands=bands), tuple(samples)


def load_band(running: float) -> int:
    """Return the number of the band that a load above 0 is in; loads of one band are comparable."""
    return round(log(running) / log(COMPARABLE))


def _of_this_life(state: Baselines, page: EnginePage) -> Baselines:
    now_life, now_finished = life(page), finished(page)
    anew = begun_anew(state.life, now_life, state.finished_total, now_finished)
    kept = (anew and now_life) or state.life or now_life
    return replace(state, life=kept, finished_total=now_finished, bands={} if anew else state.bands)


def _still(busiest: tuple[float, float], now_seconds: float) -> float:
    running, seen_seconds = busiest
    passed_seconds = max(0.0, now_seconds - seen_seconds)  # below 0 where a clock was set back, by years at times
    return float(running * 0.5 ** (passed_seconds / HALF_LIFE_SECONDS))


def _busiest(before: tuple[float, float], running: float, now_seconds: float) -> tuple[float, float]:
    return (running, now_seconds) if running >= _still(before, now_seconds) else before


def _learned(before: tuple[int, float] | None, held_bytes: int) -> tuple[int, float]:
    count, mean = before or (0, 0.0)
    if count >= READINGS:
        return count, mean
    return count + 1, mean + (held_bytes - mean) / (count + 1)


def _ratio(learned: tuple[int, float] | None, held_bytes: int) -> float | None:
    if learned is None or learned[0] < READINGS or learned[1] <= 0:
        return None
    return held_bytes / learned[1]


def per_request(snapshot: Snapshot) -> tuple[Sample, ...]:
    """Return the memory the engine holds on each GPU over the running requests of the whole page.

    A request runs on every GPU of a tensor-parallel engine and on one of a data-parallel one; either way the sum over
    the GPUs is the memory per request of the whole server. Absent while nothing runs, or while one of the
    engines does not say; and at nothing held, as when the engine dies between the two readings.
    """
    running = running_requests(snapshot.page)
    if not running:
        return ()
    return tuple(
        Sample(catalog.MEMORY_PER_RUNNING_REQUEST, gpu_labels(gpu), gpu.held_bytes / running)
        for gpu in snapshot.devices
        if gpu.held_bytes
    )
