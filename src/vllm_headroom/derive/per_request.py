"""Memory per running request, against a baseline at comparable load."""

from math import log
from typing import Final, NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.pages import count_finished, count_running
from vllm_headroom.derive.run_identity import identify_run, is_new_run
from vllm_headroom.derive.series import label_gpu, limit_remembered
from vllm_headroom.model import EnginePage, Failure, Sample, Snapshot
from vllm_headroom.units import DAY_SECONDS

COMPARABLE_FACTOR: Final = 1.1
"""Loads within this factor are comparable; the alert is at 1.1 (9.5 to 10.5 MB per request in the
post-mortem)."""

BASELINE_READINGS: Final = 60
"""Readings in a baseline, five minutes at the default interval: a shorter one would be a burst's
peak."""

WARM_REQUESTS: Final = 1000.0
"""Requests finished in this run before a baseline is learned: kernels have been used for the first
time by then."""

HALF_LIFE_SECONDS: Final = DAY_SECONDS
"""Decay of the busiest load: load has a daily cycle."""


class Baseline(NamedTuple):
    """The memory that the engine held on a GPU in the first readings at comparable load."""

    readings: int = 0
    mean_bytes: float = 0.0


class BusiestLoad(NamedTuple):
    """The most requests that ran at once, and when, in seconds since the epoch."""

    running: float = 0.0
    seconds: float = 0.0


class Baselines(Struct, frozen=True, kw_only=True):
    """What was learned in one run of the engine."""

    run_id: str | None = field(default=None, name="life")  # its name in the state file
    finished_total: float | None = None
    bands: dict[str, dict[int, Baseline]] = field(default_factory=dict)
    """The baselines by the GPU's UUID and the load band."""

    busiest: BusiestLoad = BusiestLoad()


def derive_baseline(
    state: Baselines, snapshot: Snapshot, *, configured_bytes: float | None
) -> tuple[Baselines, tuple[Sample, ...]]:
    """Return memory per running request over its baseline.

    With `configured_bytes` (per running request and GPU at full load) that is the baseline, and
    there is a sample only near the busiest load: at night the same memory is spread over fewer
    requests. Else it is the mean of the first readings at comparable load. No sample while nothing
    runs.
    """
    page = snapshot.page
    if page is None or not snapshot.is_in_service or isinstance(snapshot.gpus, Failure):
        return state, ()
    state = _follow_run(state, page)
    running = count_running(page)
    if not running:
        return state, ()
    busiest_running = max(running, _decay_busiest(state.busiest, snapshot.time_seconds))
    if running >= busiest_running:
        state = replace(state, busiest=BusiestLoad(running, snapshot.time_seconds))

    samples = []
    bands = limit_remembered(state.bands, {gpu.reading.uuid for gpu in snapshot.gpus})
    is_warm = (state.finished_total or 0.0) >= WARM_REQUESTS
    # At less load, configured memory is spread over fewer requests than at full load.
    is_near_busiest = running * COMPARABLE_FACTOR >= busiest_running
    band = find_load_band(running)
    for gpu in snapshot.gpus:
        # Unknown, or the engine exited between the two readings.
        if not gpu.held_bytes:
            continue
        ratio = None
        if configured_bytes is None:
            baselines = bands.get(gpu.reading.uuid, {})
            baseline = baselines.get(band, Baseline())
            ratio = _compare(gpu.held_bytes, baseline)
            if is_warm and baseline.readings < BASELINE_READINGS:
                learned = _learn(baseline, gpu.held_bytes)
                bands[gpu.reading.uuid] = {**baselines, band: learned}
        elif is_near_busiest:
            ratio = gpu.held_bytes / running / configured_bytes
        if ratio is not None:
            samples.append(Sample(catalog.MEMORY_PER_REQUEST_RATIO, label_gpu(gpu), ratio))
    return replace(state, bands=bands), tuple(samples)


def _follow_run(state: Baselines, page: EnginePage) -> Baselines:
    """Return the state of the run that the page is of: a new run has no baselines yet."""
    run_id = identify_run(page)
    finished_total = count_finished(page)
    if is_new_run(state.run_id, run_id, state.finished_total, finished_total):
        return replace(
            state, run_id=run_id or state.run_id, finished_total=finished_total, bands={}
        )
    return replace(state, run_id=state.run_id or run_id, finished_total=finished_total)


def _decay_busiest(busiest: BusiestLoad, now: float) -> float:
    """Return the busiest load, halved for each half-life since; `now` is in seconds."""
    # A clock that was set back has not passed a negative time.
    passed_seconds = max(0.0, now - busiest.seconds)
    return float(busiest.running * 0.5 ** (passed_seconds / HALF_LIFE_SECONDS))


def _compare(held_bytes: int, baseline: Baseline) -> float | None:
    """Return the memory over its baseline; None while that is being learned."""
    if baseline.readings < BASELINE_READINGS or baseline.mean_bytes <= 0:
        return None
    return held_bytes / baseline.mean_bytes


def _learn(baseline: Baseline, held_bytes: int) -> Baseline:
    """Return the baseline with one more reading."""
    readings = baseline.readings + 1
    mean_bytes = baseline.mean_bytes + (held_bytes - baseline.mean_bytes) / readings
    return Baseline(readings, mean_bytes)


def find_load_band(running: float) -> int:
    """Return the number of the band of a load above 0; loads of one band are comparable."""
    return round(log(running) / log(COMPARABLE_FACTOR))


def derive_per_request(snapshot: Snapshot) -> tuple[Sample, ...]:
    """Return, per GPU, the memory the engine holds over the running requests of the whole page.

    Summed over the GPUs this is the memory per request of the whole server, for tensor and data
    parallelism alike. Absent while nothing runs, while an engine does not report its requests,
    and at nothing held, as when the engine exits between the two readings.
    """
    running = count_running(snapshot.page)
    if not running:
        return ()
    return tuple(
        Sample(catalog.MEMORY_PER_RUNNING_REQUEST, label_gpu(gpu), gpu.held_bytes / running)
        for gpu in snapshot.devices
        if gpu.held_bytes
    )
