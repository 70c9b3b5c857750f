"""Whether load is level, and each GPU's memory change since it became level."""

from statistics import fmean
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.derive.pages import list_named
from vllm_headroom.derive.series import label_gpu
from vllm_headroom.derive.sums import sum_known
from vllm_headroom.model import Sample, Snapshot

MINUTE_SECONDS: Final = 60.0
WINDOW_MINUTES: Final = 10
"""The length of the window in minutes. The ten minutes come from the alert rule that a post-mortem
recommends.
"""

BAND_SHARE: Final = 0.15
"""Load is level if every minute's mean is within this share of the window's. Random arrivals alone
can cause this much variation.
"""

BAND_REQUESTS: Final = 2.0
"""At low load, a minute's mean may differ from the window's by this many requests."""


class LoadState(Struct, frozen=True, kw_only=True):
    """How many requests the engine had in the most recent minutes."""

    minute_means: tuple[float, ...] = ()
    """The mean number of requests in each full minute, with the newest last."""

    minute_began_seconds: float | None = None
    """When the current minute began, on the monotonic clock."""

    requests_sum: float = 0.0
    """The sum of the current minute's samples. Each sample is a number of requests."""

    sample_count: int = 0
    """The number of samples in the current minute."""

    is_stable: bool | None = None
    """Whether load was level after the last full minute. The value is None until the window is
    full.
    """

    held_bytes: dict[str, int] = field(default_factory=dict)
    """The memory that the engine held when load became level, by the GPU's UUID."""


def derive_load(state: LoadState, snapshot: Snapshot) -> tuple[LoadState, tuple[Sample, ...]]:
    """Return whether load is level, and each GPU's change in memory since it became level.

    There are no samples until ten minutes have been measured. If the number of running requests is
    unknown, the measurement starts over.
    """
    engines = () if snapshot.page is None else list_named(snapshot.page)
    running_requests = sum_known(engine.running for engine in engines)
    if running_requests is None:
        return LoadState(), ()
    requests = running_requests + sum(engine.waiting or 0.0 for engine in engines)
    state = _add_sample(state, requests, snapshot.monotonic_seconds)
    if state.is_stable is None:
        return state, ()
    # Under changing load, a difference in memory would only reflect the load.
    if not state.is_stable:
        return replace(state, held_bytes={}), (Sample(catalog.LOAD_STABLE, (), 0.0),)

    reference_bytes: dict[str, int] = {}
    samples = [Sample(catalog.LOAD_STABLE, (), 1.0)]
    for gpu in snapshot.devices:
        if gpu.held_bytes is None:
            continue
        uuid = gpu.reading.uuid
        # Later readings are compared with the first reading at level load.
        reference_bytes[uuid] = state.held_bytes.get(uuid, gpu.held_bytes)
        delta_bytes = gpu.held_bytes - reference_bytes[uuid]
        samples.append(Sample(catalog.MEMORY_DELTA, label_gpu(gpu), delta_bytes))
    return replace(state, held_bytes=reference_bytes), tuple(samples)


def _add_sample(state: LoadState, requests: float, now_seconds: float) -> LoadState:
    """Return the state with one more sample; load is judged again after each full minute."""
    began_seconds = state.minute_began_seconds
    # If the clock was set back, the minute starts over.
    if began_seconds is None or now_seconds < began_seconds:
        began_seconds = now_seconds
    requests_sum = state.requests_sum + requests
    sample_count = state.sample_count + 1
    if now_seconds - began_seconds < MINUTE_SECONDS:
        return replace(
            state,
            minute_began_seconds=began_seconds,
            requests_sum=requests_sum,
            sample_count=sample_count,
        )
    minute_means = (*state.minute_means, requests_sum / sample_count)[-WINDOW_MINUTES:]
    is_stable = None
    if len(minute_means) == WINDOW_MINUTES:
        window_mean = fmean(minute_means)
        band_requests = max(BAND_SHARE * window_mean, BAND_REQUESTS)
        is_stable = all(abs(mean - window_mean) <= band_requests for mean in minute_means)
    return LoadState(
        minute_means=minute_means,
        minute_began_seconds=now_seconds,
        is_stable=is_stable,
        held_bytes=state.held_bytes,
    )
