"""Memory per running request, against a baseline at comparable load."""

from math import log
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.readings import (
    count_finished,
    count_running,
    identify_run,
    is_new_run,
    label_gpu,
    limit_remembered,
)
from vllm_headroom.model import EnginePage, Failure, Sample, Snapshot

COMPARABLE: Final = 1.1
"""Loads within this factor are comparable; the alert is at 1.1 (9.5 to 10.5 MB per request in the post-mortem)."""

READINGS: Final = 60
"""Readings in a baseline, five minutes at the default interval: a shorter one would be a burst's peak."""

WARM_REQUESTS: Final = 1000.0
"""Requests finished in this run before a baseline is learned: kernels have been used for the first time by then."""


HALF_LIFE_SECONDS: Final = 86_400.0
"""Decay of the busiest load: load has a daily cycle."""


class Baselines(Struct, frozen=True, kw_only=True):
    """Learned memory per GPU and load band in one run: (readings so far, mean bytes held).

    `busiest` is the most requests that ran at once, and when, in seconds since the epoch.
    """

    life: str | None = None
    finished_total: float | None = None
    bands: dict[str, dict[int, tuple[int, float]]] = field(default_factory=dict)
    busiest: tuple[float, float] = (0.0, 0.0)


def derive_baseline(
    state: Baselines, snapshot: Snapshot, *, configured_bytes: float | None
) -> tuple[Baselines, tuple[Sample, ...]]:
    """Return memory per running request over its baseline.

    With `configured_bytes` (per running request and GPU at full load) that is the baseline, and there is a sample only
    near the busiest load: at night the same memory is spread over fewer requests. Else it is the mean of the first
    readings at comparable load. No sample while nothing runs.
    """
    page = snapshot.page
    if page is None or not snapshot.in_service or isinstance(snapshot.gpus, Failure):
        return state, ()
    state = _keep_run(state, page)
    running = count_running(page)
    if not running:
        return state, ()
    is_peak = running >= _decay_busiest(state.busiest, snapshot.time_seconds)
    state = replace(state, busiest=(running, snapshot.time_seconds) if is_peak else state.busiest)
    band, warm = find_load_band(running), (count_finished(page) or 0.0) >= WARM_REQUESTS
    samples = []
    bands = limit_remembered(state.bands, {gpu.reading.uuid for gpu in snapshot.gpus})
    for gpu in snapshot.gpus:
        if not gpu.held_bytes:  # unknown, or the engine died between the two readings
            continue
        if configured_bytes is not None:
            full = running * COMPARABLE >= _decay_busiest(state.busiest, snapshot.time_seconds)
            ratio = gpu.held_bytes / running / configured_bytes if full else None
        else:
            mine = bands.get(gpu.reading.uuid, {})
            ratio = _compute_ratio(mine.get(band), gpu.held_bytes)
            if warm:
                bands[gpu.reading.uuid] = {**mine, band: _learn(mine.get(band), gpu.held_bytes)}
        if ratio is not None:
            samples.append(Sample(catalog.MEMORY_PER_REQUEST_RATIO, label_gpu(gpu), ratio))
    return replace(state, bands=bands), tuple(samples)


def find_load_band(running: float) -> int:
    """Return the number of the band of a load above 0; loads of one band are comparable."""
    return round(log(running) / log(COMPARABLE))


def _keep_run(state: Baselines, page: EnginePage) -> Baselines:
    now_life, now_finished = identify_run(page), count_finished(page)
    is_new = is_new_run(state.life, now_life, state.finished_total, now_finished)
    kept = (is_new and now_life) or state.life or now_life
    return replace(state, life=kept, finished_total=now_finished, bands={} if is_new else state.bands)


def _decay_busiest(busiest: tuple[float, float], now_seconds: float) -> float:
    running, seen_seconds = busiest
    passed_seconds = max(0.0, now_seconds - seen_seconds)  # below 0 where a clock was set back, by years at times
    return float(running * 0.5 ** (passed_seconds / HALF_LIFE_SECONDS))


def _learn(before: tuple[int, float] | None, held_bytes: int) -> tuple[int, float]:
    count, mean = before or (0, 0.0)
    if count >= READINGS:
        return count, mean
    return count + 1, mean + (held_bytes - mean) / (count + 1)


def _compute_ratio(learned: tuple[int, float] | None, held_bytes: int) -> float | None:
    if learned is None or learned[0] < READINGS or learned[1] <= 0:
        return None
    return held_bytes / learned[1]


def derive_per_request(snapshot: Snapshot) -> tuple[Sample, ...]:
    """Return, per GPU, the memory the engine holds over the running requests of the whole page.

    Summed over the GPUs this is the memory per request of the whole server, for tensor and data parallelism alike.
    Absent while nothing runs, while an engine does not report its requests, and at nothing held, as when the engine
    exits between the two readings.
    """
    running = count_running(snapshot.page)
    if not running:
        return ()
    return tuple(
        Sample(catalog.MEMORY_PER_RUNNING_REQUEST, label_gpu(gpu), gpu.held_bytes / running)
        for gpu in snapshot.devices
        if gpu.held_bytes
    )
