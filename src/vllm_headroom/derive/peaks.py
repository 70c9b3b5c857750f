"""How high memory rises during a step, and which requests still fit."""

from collections.abc import Mapping
from math import sqrt
from typing import Final, NamedTuple

from msgspec import Struct

from vllm_headroom import catalog
from vllm_headroom.derive.pages import list_engines
from vllm_headroom.derive.series import label_gpu
from vllm_headroom.model import (
    Gpu,
    PeakReadings,
    ProbedProcess,
    ProbeReadings,
    Sample,
    SizePeak,
    Snapshot,
    WorkPeaks,
)
from vllm_headroom.units import MIB
from vllm_headroom.vocabulary import Work

LOWEST_SIZE_SHARE: Final = 1 / 16
"""Only sizes of at least this share of the largest size are fitted. Small steps run in CUDA graphs.
The peak of a small step is not determined by its size, but for example by the logits.
"""

FEWEST_SIZES: Final = 4
"""With fewer sizes, the prediction interval is too wide to be useful."""

FEWEST_STEPS: Final = 8
"""With fewer steps, a kind of work has no fitted line."""

SMALLEST_DEVIATION_BYTES: Final = MIB
"""The smallest standard deviation that is assumed for a peak. A block of torch may be 1 MiB larger
than requested (c10/cuda/CUDACachingAllocator.cpp, should_split).
"""

UNUSABLE_CACHED_SHARE: Final = 0.3
"""The share of torch's unused segments that a larger step cannot use. When a tensor takes part of a
segment, the next tensor does not fit in. With prompt logprobs, at most a fifth is unusable. At an
OutOfMemoryError, 18 % was measured.
"""

FURTHEST_SIZE_FACTOR: Final = 4
"""If no vLLM setting limits a step's size, predictions end here. The limit is this many times the
largest observed size.
"""

T_QUANTILES: Final = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""The 97.5 % quantiles of Student's t-distribution with 1, 2, … degrees of freedom."""

LARGEST_T: Final = 2.2
"""The quantile for 11 degrees of freedom, also used for more."""


class PeakLine(Struct, frozen=True, kw_only=True):
    """A line of peak bytes over step size, with the data for its prediction interval.

    The line is fitted by weighted least squares. Large peaks scatter more than small ones. A peak's
    weight therefore decreases with its size.
    """

    base_bytes: float
    bytes_per_unit: float
    deviation_ratio: float
    """The standard deviation of the peaks from the line, as a share of the peak."""

    freedom: int
    """The degrees of freedom: the number of sizes minus 2."""

    weight_sum: float
    mean_size: float
    """The weighted mean of the sizes."""

    square_sum: float
    """The weighted sum of the squared distances of the sizes from their mean."""

    largest_size: int

    def predict_bytes(self, size: float) -> float:
        """Return the expected peak of a step of this size."""
        return max(0.0, self.base_bytes + self.bytes_per_unit * size)

    def measure_spread(self, size: float) -> float:
        """Return half the width of the 95 % prediction interval at a size, in bytes."""
        quantile = LARGEST_T
        if self.freedom <= len(T_QUANTILES):
            quantile = T_QUANTILES[self.freedom - 1]
        distance = size - self.mean_size
        line_variance = 1 / self.weight_sum + distance * distance / self.square_sum
        own_variance = self.predict_bytes(size) ** 2
        scatter = self.deviation_ratio**2 * (line_variance + own_variance)
        return quantile * sqrt(scatter + SMALLEST_DEVIATION_BYTES**2)

    def predict_upper_bytes(self, size: float) -> float:
        """Return the upper end of the 95 % prediction interval at a size."""
        return self.predict_bytes(size) + self.measure_spread(size)


def fit_sizes(peaks: tuple[SizePeak, ...]) -> PeakLine | None:
    """Return the line of peak bytes over step size.

    Returns None if the work was observed too rarely.
    """
    largest_size = max((peak.size for peak in peaks), default=0)
    lowest_size = max(1.0, LOWEST_SIZE_SHARE * largest_size)
    fitted = [peak for peak in peaks if peak.size >= lowest_size]
    count = len({peak.size for peak in fitted})
    if count < FEWEST_SIZES or sum(peak.steps for peak in peaks) < FEWEST_STEPS:
        return None
    points = [_weigh(peak) for peak in fitted]
    weight_sum = sum(point.weight for point in points)
    mean_size = sum(point.weight * point.size for point in points) / weight_sum
    mean_bytes = sum(point.weight * point.transient_bytes for point in points) / weight_sum
    square_sum = sum(point.weight * (point.size - mean_size) ** 2 for point in points)
    product_sum = sum(
        point.weight * (point.size - mean_size) * (point.transient_bytes - mean_bytes)
        for point in points
    )
    # A larger request never needs less memory, so a falling line is noise.
    bytes_per_unit = max(0.0, product_sum / square_sum)
    base_bytes = mean_bytes - bytes_per_unit * mean_size
    residual_sum = sum(
        point.weight * (point.transient_bytes - base_bytes - bytes_per_unit * point.size) ** 2
        for point in points
    )
    freedom = len(points) - 2
    return PeakLine(
        base_bytes=base_bytes,
        bytes_per_unit=bytes_per_unit,
        deviation_ratio=sqrt(residual_sum / freedom),
        freedom=freedom,
        weight_sum=weight_sum,
        mean_size=mean_size,
        square_sum=square_sum,
        largest_size=largest_size,
    )


class FitPoint(NamedTuple):
    """The peak that was observed at one size, as a point for the fit."""

    size: int
    transient_bytes: int
    weight: float


def _weigh(peak: SizePeak) -> FitPoint:
    """Return a peak, weighted by the inverse of its variance."""
    deviation = peak.transient_bytes + SMALLEST_DEVIATION_BYTES
    return FitPoint(peak.size, peak.transient_bytes, 1 / deviation**2)


def find_largest_size(fit: PeakLine, room_bytes: float, limit: int) -> int:
    """Return the largest size up to `limit` that fits the room, or 0.

    A size fits if its upper bound does.
    """
    if fit.predict_upper_bytes(limit) <= room_bytes:
        return limit
    # The confidence interval is narrowest near the mean. As the size grows, the upper bound may
    # therefore fall at first and rise later. The size sought is above the size with the lowest
    # upper bound.
    fitting_size = 0
    too_large_size = limit
    while too_large_size - fitting_size > 1:
        size = (fitting_size + too_large_size) // 2
        if fit.predict_upper_bytes(size) <= room_bytes:
            fitting_size = size
        else:
            too_large_size = size
    return fitting_size


class PeakRoom(NamedTuple):
    """The memory that a step may take on a GPU."""

    free_bytes: int
    """The free GPU memory that the engine may take."""

    cached_bytes: int
    """The memory that torch holds unused, in segments that are entirely free."""

    @property
    def repeated_bytes(self) -> int:
        """Return the room for a step like an earlier one.

        A step like an earlier one can use all cached segments.
        """
        return self.free_bytes + self.cached_bytes

    @property
    def larger_bytes(self) -> float:
        """Return the room for a step larger than all before.

        A step larger than all before can use only some of the cached segments.
        """
        return self.free_bytes + (1 - UNUSABLE_CACHED_SHARE) * self.cached_bytes


def find_peak_room(gpu: Gpu, peaks: PeakReadings) -> PeakRoom | None:
    """Return the memory that a step may take on a GPU, or None if unknown."""
    free_bytes = gpu.room_bytes
    reserved_bytes = peaks.resting_reserved_bytes
    allocated_bytes = peaks.resting_allocated_bytes
    split_bytes = peaks.resting_split_bytes
    if free_bytes is None or reserved_bytes is None or allocated_bytes is None:
        return None
    # Since the newest step, torch may have returned memory to the GPU. The memory returned to the
    # GPU now counts as free.
    newest_reserved_bytes = None if gpu.inside is None else gpu.inside.reserved_bytes
    if newest_reserved_bytes is not None:
        reserved_bytes = min(reserved_bytes, newest_reserved_bytes)
    return PeakRoom(
        free_bytes=max(0, free_bytes),
        cached_bytes=max(0, reserved_bytes - allocated_bytes - (split_bytes or 0)),
    )


def derive_peaks(snapshot: Snapshot) -> tuple[Sample, ...]:
    """Return the samples of each of the engine's GPUs for which a worker reports peaks."""
    samples: list[Sample] = []
    for gpu in snapshot.owned_gpus:
        process = find_worker(gpu, snapshot)
        if process is not None and process.peaks is not None:
            samples += _derive_gpu(gpu, process, process.peaks, snapshot)
    return tuple(samples)


def find_worker(gpu: Gpu, snapshot: Snapshot) -> ProbedProcess | None:
    """Return the newest process that reports its peaks on a GPU, or None."""
    if not isinstance(snapshot.probe, ProbeReadings):
        return None
    uuid = gpu.reading.uuid.casefold()
    for process in reversed(snapshot.probe.present):
        uuids = [device.uuid.casefold() for device in process.devices]
        if process.peaks is not None and uuids == [uuid]:
            return process
    return None


def _derive_gpu(
    gpu: Gpu, process: ProbedProcess, peaks: PeakReadings, snapshot: Snapshot
) -> list[Sample]:
    """Return one GPU's samples: the peaks, their room, and the sizes that fit."""
    labels = label_gpu(gpu)
    room = find_peak_room(gpu, peaks)
    room_bytes = None if room is None else room.repeated_bytes
    samples = []
    if room_bytes is not None:
        samples.append(Sample(catalog.ENGINE_PEAK_ROOM, labels, float(room_bytes)))
    fits = {}
    for of_work in peaks.works:
        fit = fit_sizes(of_work.sizes)
        fits[of_work.work] = fit
        samples += _derive_work(of_work, fit, (*labels, str(of_work.work)), room_bytes)
    if room is not None:
        cache_tokens = _find_free_cache_tokens(snapshot, process.data_parallel_rank)
        safe_sizes = _find_safe_sizes(peaks, fits, room.larger_bytes, cache_tokens)
        for metric, work in SAFE_METRICS:
            if work in safe_sizes:
                samples.append(Sample(metric, labels, float(safe_sizes[work])))
    return samples


def _derive_work(
    work: WorkPeaks, fit: PeakLine | None, labels: tuple[str, ...], room_bytes: int | None
) -> list[Sample]:
    """Return the samples of one kind of work.

    `fit` is None if the work was observed too rarely.
    """
    samples = []
    if work.recent is not None:
        recent_bytes = float(work.recent.transient_bytes)
        samples.append(Sample(catalog.ENGINE_PEAK, labels, recent_bytes))
        if room_bytes:
            samples.append(Sample(catalog.ENGINE_PEAK_RATIO, labels, recent_bytes / room_bytes))
    if fit is not None and work.highest is not None:
        spread_bytes = fit.measure_spread(work.highest.size)
        samples.append(Sample(catalog.ENGINE_PEAK_SPREAD, labels, spread_bytes))
    return samples


SAFE_METRICS: Final = (
    (catalog.ENGINE_SAFE_PROMPT_TOKENS, Work.PREFILL),
    (catalog.ENGINE_SAFE_PROMPT_LOGPROBS_TOKENS, Work.PROMPT_LOGPROBS),
    (catalog.ENGINE_SAFE_IMAGE_PIXELS, Work.ENCODER),
)
"""The metric for the largest safe request of each kind of work."""


def _find_free_cache_tokens(snapshot: Snapshot, rank: int | None) -> int | None:
    """Return the free KV-cache tokens of the engine with this data-parallel rank.

    If no engine has that rank, the engine with the fewest free tokens is used. Returns None if the
    number of tokens is unknown.
    """
    engines = list_engines(snapshot.page)
    named = [engine for engine in engines if engine.engine == str(rank)]
    free_tokens = []
    for engine in named or engines:
        if engine.kv_capacity_tokens is None or engine.kv_used_ratio is None:
            return None
        free_tokens.append(engine.kv_capacity_tokens * (1 - engine.kv_used_ratio))
    return max(0, int(min(free_tokens))) if free_tokens else None


def _find_safe_sizes(
    peaks: PeakReadings,
    fits: Mapping[Work, PeakLine | None],
    room_bytes: float,
    cache_tokens: int | None,
) -> dict[Work, int]:
    """Return the largest single request of each kind of work that fits the room.

    A kind of work is omitted if it was observed too rarely to be fitted. A long prompt is computed
    in steps of at most `batch_tokens`. If a step of `batch_tokens` fits, only the KV cache and the
    model limit the prompt. If neither of these limits is known, the prompt size is omitted.
    """
    sizes: dict[Work, int] = {}
    for work in (Work.PREFILL, Work.PROMPT_LOGPROBS):
        fit = fits.get(work)
        if fit is not None:
            tokens = _find_safe_tokens(fit, peaks, room_bytes, cache_tokens)
            if tokens is not None:
                sizes[work] = tokens
    # A prompt with prompt logprobs is also a prompt. The smaller of the two sizes applies.
    if Work.PROMPT_LOGPROBS in sizes:
        sizes[Work.PROMPT_LOGPROBS] = min(sizes.values())
    encoder_fit = fits.get(Work.ENCODER)
    if encoder_fit is not None:
        limit = FURTHEST_SIZE_FACTOR * encoder_fit.largest_size
        sizes[Work.ENCODER] = find_largest_size(encoder_fit, room_bytes, limit)
    return sizes


def _find_safe_tokens(
    fit: PeakLine, peaks: PeakReadings, room_bytes: float, cache_tokens: int | None
) -> int | None:
    """Return the tokens of the largest safe prompt, or None if the limit is unknown."""
    step_limit = peaks.batch_tokens or FURTHEST_SIZE_FACTOR * fit.largest_size
    step_tokens = find_largest_size(fit, room_bytes, step_limit)
    if peaks.batch_tokens is None or step_tokens < peaks.batch_tokens:
        limits = [step_tokens, cache_tokens, peaks.model_tokens]
    else:
        limits = [cache_tokens, peaks.model_tokens]
    known_limits = [limit for limit in limits if limit is not None]
    return min(known_limits, default=None)
