"""Memory per running request, compared with a baseline at comparable load."""

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
"""Two loads are comparable if they differ by at most this factor. The alert uses the same factor.
The factor is from a post-mortem. Memory per request rose from 9.5 to 10.5 MB there.
"""

BASELINE_READINGS: Final = 60
"""The number of readings in a baseline. At the default interval, they take five minutes. A baseline
learned over a shorter time could reflect the peak of a burst.
"""

WARM_REQUESTS: Final = 1000.0
"""A baseline is learned only after this many requests have finished in this run. By then, every
kernel has been used once.
"""

HALF_LIFE_SECONDS: Final = DAY_SECONDS
"""The remembered highest load is halved over this time, because load has a daily cycle."""


class Baseline(NamedTuple):
    """The memory held on a GPU in the first readings of one load band."""

    readings: int = 0
    mean_bytes: float = 0.0


class BusiestLoad(NamedTuple):
    """The highest number of running requests, and when it was seen.

    The time is in seconds since the epoch.
    """

    running: float = 0.0
    seconds: float = 0.0


class Baselines(Struct, frozen=True, kw_only=True):
    """The baselines learned in one run of the engine, and the highest load so far."""

    run_id: str | None = field(default=None, name="life")  # its name in the state file
    finished_total: float | None = None
    bands: dict[str, dict[int, Baseline]] = field(default_factory=dict)
    """The baselines, by the GPU's UUID and the number of the load band."""

    busiest: BusiestLoad = BusiestLoad()
    """The highest load seen in any run, stored without decay."""


def derive_baseline(
    state: Baselines, snapshot: Snapshot, *, configured_bytes: float | None
) -> tuple[Baselines, tuple[Sample, ...]]:
    """Return each GPU's memory per running request as a ratio of its baseline.

    `configured_bytes` is the baseline: the memory per running request on each GPU at full load. If
    `configured_bytes` is set, there is a sample only near the highest load. At lower load, the
    memory per request is higher. If `configured_bytes` is not set, the baseline is the mean of the
    first readings at comparable load. There is no sample until the baseline has been learned, or
    while no request is running.
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
    # Kernels take memory on first use, and this memory is not needed for any request.
    is_warm = (state.finished_total or 0.0) >= WARM_REQUESTS
    # At lower load, the same memory is divided by fewer requests.
    is_near_busiest = running * COMPARABLE_FACTOR >= busiest_running
    band = find_load_band(running)
    for gpu in snapshot.gpus:
        # The memory is None if unknown. The memory is 0 if the engine exited between the readings
        # of the page and the GPU.
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
    """Return the state with the page's run and finished requests.

    A new run has no baselines.
    """
    run_id = identify_run(page)
    finished_total = count_finished(page)
    if is_new_run(state.run_id, run_id, state.finished_total, finished_total):
        return replace(
            state, run_id=run_id or state.run_id, finished_total=finished_total, bands={}
        )
    return replace(state, run_id=state.run_id or run_id, finished_total=finished_total)


def _decay_busiest(busiest: BusiestLoad, now: float) -> float:
    """Return the highest load as remembered at `now`, halved for each half-life that has passed."""
    # If the clock was set back, it is assumed that no time has passed.
    passed_seconds = max(0.0, now - busiest.seconds)
    return float(busiest.running * 0.5 ** (passed_seconds / HALF_LIFE_SECONDS))


def _compare(held_bytes: int, baseline: Baseline) -> float | None:
    """Return the memory as a ratio of its baseline.

    Returns None while the baseline is being learned.
    """
    if baseline.readings < BASELINE_READINGS or baseline.mean_bytes <= 0:
        return None
    return held_bytes / baseline.mean_bytes


def _learn(baseline: Baseline, held_bytes: int) -> Baseline:
    """Return the baseline with one more reading."""
    readings = baseline.readings + 1
    mean_bytes = baseline.mean_bytes + (held_bytes - baseline.mean_bytes) / readings
    return Baseline(readings, mean_bytes)


def find_load_band(running: float) -> int:
    """Return the number of the band that contains this load.

    Loads in one band are comparable.
    """
    return round(log(running) / log(COMPARABLE_FACTOR))


def derive_per_request(snapshot: Snapshot) -> tuple[Sample, ...]:
    """Return the memory held on each GPU, divided by the page's running requests.

    The sum over the GPUs is the whole server's memory per request. The sum is correct for both
    tensor and data parallelism. There are no samples while no request is running, or while an
    engine does not report its requests. A GPU on which the engine holds nothing has no sample. A
    GPU without engine memory occurs when the engine exits between the readings of the page and the
    GPU.
    """
    running = count_running(snapshot.page)
    if not running:
        return ()
    return tuple(
        Sample(catalog.MEMORY_PER_RUNNING_REQUEST, label_gpu(gpu), gpu.held_bytes / running)
        for gpu in snapshot.devices
        if gpu.held_bytes
    )
