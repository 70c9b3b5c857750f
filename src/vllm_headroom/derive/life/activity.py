"""Whether the core, the workers and the GPUs of an engine do anything."""

from collections.abc import Collection
from enum import Enum, auto
from typing import Final

from msgspec import Struct

from vllm_headroom.derive.attribution import NEIGHBOUR_BYTES
from vllm_headroom.model import EngineProcess, Gpu, Snapshot
from vllm_headroom.vocabulary import NECESSARY_ROLES

SPAN_SECONDS: Final = 20.0
"""How long CPU time and GPU utilisation are observed for one judgement. A minute without progress
contains at least one whole span at any sampling interval.
"""

BUSY_CPU_RATIO: Final = 0.1
"""Core and workers are busy above this many CPU seconds per second. Our choice: a process that
waits for requests uses almost none, and one that spins uses a whole core.
"""

BUSY_GPU_RATIO: Final = 0.1
"""A GPU is busy above this utilisation. Our choice: a kernel that never ends shows 1, and a GPU
without work shows 0.
"""


class Activity(Enum):
    """Whether core, workers and GPUs are busy."""

    BUSY = auto()
    """Core and workers use CPU time, or a GPU computes."""
    IDLE = auto()
    """Both sides are visible, and neither is busy."""
    PARTLY_IDLE = auto()
    """Only one of the two sides is visible, and it is not busy."""
    UNKNOWN = auto()
    """Neither side is visible."""


class ActivityTrack(Struct, frozen=True, kw_only=True):
    """The newest complete span of observation, and the present span; None is unknown."""

    cpu_ratio: float | None = None
    """CPU seconds per second of core and workers in the newest complete span."""
    gpu_ratio: float | None = None
    """The highest utilisation of a GPU in the newest complete span."""
    has_spun_idle: bool = False
    """Whether core and workers use CPU time even without work. If so, CPU time proves nothing. The
    workers of tensor parallelism spin while they wait for the core, in some versions of vLLM.
    """
    begin_seconds: float | None = None
    """When the present span began, on the monotonic clock."""
    begin_cpu_seconds: float | None = None
    peak_gpu_ratio: float | None = None
    is_without_work: bool = True
    """Whether the page has shown no work in the whole of the present span."""

    def judge(self) -> Activity:
        """Return whether core, workers and GPUs were busy in the newest complete span."""
        cpu_ratio = None if self.has_spun_idle else self.cpu_ratio
        is_cpu_busy = None if cpu_ratio is None else cpu_ratio >= BUSY_CPU_RATIO
        is_gpu_busy = None if self.gpu_ratio is None else self.gpu_ratio >= BUSY_GPU_RATIO
        # One busy side proves work; the engine is idle only if both sides are idle.
        if is_cpu_busy or is_gpu_busy:
            return Activity.BUSY
        if is_cpu_busy is None and is_gpu_busy is None:
            return Activity.UNKNOWN
        if is_cpu_busy is None or is_gpu_busy is None:
            return Activity.PARTLY_IDLE
        return Activity.IDLE


def update_activity(
    previous: ActivityTrack,
    snapshot: Snapshot,
    processes: Collection[EngineProcess] | None,
    *,
    is_without_work: bool,
) -> ActivityTrack:
    """Return the track with one more sample; `is_without_work` is what the page shows."""
    now = snapshot.monotonic_seconds
    cpu_seconds = _sum_cpu_seconds(processes)
    gpu_ratio = _find_gpu_ratio(snapshot)
    if previous.begin_seconds is None:
        return _begin_span(previous, now, cpu_seconds, gpu_ratio, is_without_work=is_without_work)
    # The peak of a span with an unknown sample is unknown.
    peak_gpu_ratio = None
    if previous.peak_gpu_ratio is not None and gpu_ratio is not None:
        peak_gpu_ratio = max(previous.peak_gpu_ratio, gpu_ratio)
    track = ActivityTrack(
        cpu_ratio=previous.cpu_ratio,
        gpu_ratio=previous.gpu_ratio,
        has_spun_idle=previous.has_spun_idle,
        begin_seconds=previous.begin_seconds,
        begin_cpu_seconds=previous.begin_cpu_seconds,
        peak_gpu_ratio=peak_gpu_ratio,
        is_without_work=previous.is_without_work and is_without_work,
    )
    span_seconds = now - previous.begin_seconds
    if span_seconds < SPAN_SECONDS:
        return track
    cpu_ratio = None
    # The sum falls when a process exits, and then the span shows nothing.
    if (
        cpu_seconds is not None
        and track.begin_cpu_seconds is not None
        and cpu_seconds >= track.begin_cpu_seconds
    ):
        cpu_ratio = (cpu_seconds - track.begin_cpu_seconds) / span_seconds
    has_spun_idle = track.has_spun_idle
    # What the core uses without work shows whether it polls while idle.
    if track.is_without_work and cpu_ratio is not None:
        has_spun_idle = cpu_ratio >= BUSY_CPU_RATIO
    whole_span = ActivityTrack(
        cpu_ratio=cpu_ratio, gpu_ratio=peak_gpu_ratio, has_spun_idle=has_spun_idle
    )
    return _begin_span(whole_span, now, cpu_seconds, gpu_ratio, is_without_work=is_without_work)


def _begin_span(
    whole_span: ActivityTrack,
    now: float,
    cpu_seconds: float | None,
    gpu_ratio: float | None,
    *,
    is_without_work: bool,
) -> ActivityTrack:
    """Return the track at the start of the next span, with the results of `whole_span`."""
    return ActivityTrack(
        cpu_ratio=whole_span.cpu_ratio,
        gpu_ratio=whole_span.gpu_ratio,
        has_spun_idle=whole_span.has_spun_idle,
        begin_seconds=now,
        begin_cpu_seconds=cpu_seconds,
        peak_gpu_ratio=gpu_ratio,
        is_without_work=is_without_work,
    )


def _sum_cpu_seconds(processes: Collection[EngineProcess] | None) -> float | None:
    """Return the CPU time of core and workers; None where there is none, or one is unknown."""
    total_seconds = None
    for process in processes or ():
        if process.role not in NECESSARY_ROLES:
            continue
        if process.cpu_seconds is None:
            return None
        total_seconds = (total_seconds or 0.0) + process.cpu_seconds
    return total_seconds


def _find_gpu_ratio(snapshot: Snapshot) -> float | None:
    """Return the highest utilisation of the engine's GPUs that is the engine's own.

    None where one GPU's is unknown and no other GPU is busy, because that one may be busy.
    """
    ratios = [_find_own_ratio(gpu) for gpu in snapshot.owned_gpus]
    known_ratios = [ratio for ratio in ratios if ratio is not None]
    highest_ratio = max(known_ratios, default=None)
    if highest_ratio is not None and highest_ratio >= BUSY_GPU_RATIO:
        return highest_ratio
    return highest_ratio if len(known_ratios) == len(ratios) else None


def _find_own_ratio(gpu: Gpu) -> float | None:
    """Return the utilisation of a GPU by the engine.

    None where it is unknown, or the GPU is busy and others may be the cause.
    """
    ratio = gpu.reading.utilization_ratio
    if ratio is None or ratio < BUSY_GPU_RATIO:
        return ratio
    is_shared = gpu.other_bytes is not None and gpu.other_bytes >= NEIGHBOUR_BYTES
    return None if is_shared else ratio
