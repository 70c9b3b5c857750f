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
from vllm_headroom.model import Failure, Sample, Snapshot

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

    run_id: str | None = field(default=None, name="life")  # its name in the state file
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
    run_id, finished_total = identify_run(page), count_finished(page)
    is_new = is_new_run(state.run_id, run_id, state.finished_total, finished_total)
    kept = (is_new and run_id) or state.run_id or run_id
    state = replace(
        state, run_id=kept, finished_total=finished_total, bands={} if is_new else state.bands
    )
    running = count_running(page)
    if not running:
        return state, ()
    most, seen_seconds = state.busiest
    passed_seconds = max(
        0.0, snapshot.time_seconds - seen_seconds
    )  # below 0 where a clock was set back
    busiest = max(running, float(most * 0.5 ** (passed_seconds / HALF_LIFE_SECONDS)))
    state = replace(
        state, busiest=(running, snapshot.time_seconds) if running >= busiest else state.busiest
    )
    band, warm = find_load_band(running), (finished_total or 0.0) >= WARM_REQUESTS
    samples = []
    bands = limit_remembered(state.bands, {gpu.reading.uuid for gpu in snapshot.gpus})
    for gpu in snapshot.gpus:
        if not gpu.held_bytes:  # unknown, or the engine died between the two readings
            continue
        if configured_bytes is not None:
            full = running * COMPARABLE >= busiest
            ratio = gpu.held_bytes / running / configured_bytes if full else None
        else:
            mine = bands.get(gpu.reading.uuid, {})
            count, mean = mine.get(band, (0, 0.0))
            ratio = gpu.held_bytes / mean if count >= READINGS and mean > 0 else None
            if warm and count < READINGS:
                mean += (gpu.held_bytes - mean) / (count + 1)
                bands[gpu.reading.uuid] = {**mine, band: (count + 1, mean)}
        if ratio is not None:
            samples.append(Sample(catalog.MEMORY_PER_REQUEST_RATIO, label_gpu(gpu), ratio))
    return replace(state, bands=bands), tuple(samples)


def find_load_band(running: float) -> int:
    """Return the number of the band of a load above 0; loads of one band are comparable."""
    return round(log(running) / log(COMPARABLE))


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
