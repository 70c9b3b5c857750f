"""How far the engine exceeds its memory budget on each GPU in the current run."""

from statistics import median
from typing import Final

from msgspec import Struct

from vllm_headroom.derive.discrepancy import find_budget
from vllm_headroom.derive.life.states import EngineRun
from vllm_headroom.derive.pages import is_page_awake, list_engines
from vllm_headroom.derive.series import limit_remembered
from vllm_headroom.model import BudgetExcess, Failure, Gpu, ProbeReadings, Snapshot
from vllm_headroom.vocabulary import MemoryPart

OVER_BUDGET_RATIO: Final = 0.03
"""An engine is over its budget from this share above the budget, as in HeadroomMemoryDiscrepancy.
"""

OVER_BUDGET_BYTES: Final = 2**30
"""The excess must also reach this many bytes. The CUDA context and the graphs are outside every
budget. Even a small model's context and graphs take a fifth of a MIG slice.
"""

RESUMED_SHARE: Final = 2 / 3
"""Our choice: an excess ends once it falls below this share of both limits above. An excess that
fluctuates around the limits is therefore counted only once.
"""

FIRST_TRAFFIC_SECONDS: Final = 300.0
"""Our choice: memory taken early counts as held from the start. Early means the first five minutes
with requests. With the first large batches, memory is taken for activations, NCCL and late kernels.
"""

LONGEST_STEP_SECONDS: Final = 60.0
"""Our choice: between two samples, at most this much counts as time with requests."""

REST_SECONDS: Final = 300.0
"""Our choice: the level at rest is the median held memory over this time. A burst during the last
part of this time does not change the median.
"""

REST_SLOT_SECONDS: Final = 15.0
"""Our choice: one reading of the held memory is kept per slot."""

USUAL_PEAK_RATIO: Final = 0.01
"""An engine's usual peak above its level at rest. The peak is a share of the GPU's memory, as in
HeadroomMemoryDiscrepancyHigh. On an 80 GiB GPU, this share is 0.8 GiB, which the logits of 2,048
tokens take. Smaller cards serve smaller models.
"""

LARGEST_PEAK_RATIO: Final = 0.08
"""By default, vLLM leaves this share of a GPU free. If memory falls by more than this, no peak has
ended. Instead, the engine fell asleep or another process exited.
"""

LARGEST_EXCESS_RATIO: Final = 0.25
"""Our choice: a larger excess means that another option has set the KV cache's size. An example is
--num-gpu-blocks-override. With such an option, the engine's real budget is unknown. On a MIG slice,
exceeding the budget by a fifth is usual.
"""

WORKING_PARTS: Final = (MemoryPart.OTHER_TENSORS, MemoryPart.FRAGMENTED, MemoryPart.CACHED)
"""The parts of torch's memory in which activations are held."""


class GpuBudget(Struct, frozen=True, kw_only=True):
    """One GPU's memory compared with the engine's budget, since its first work.

    Times are on the monotonic clock.
    """

    budget_bytes: float
    newest_seconds: float
    busy_seconds: float = 0.0
    """The total time during which requests have been running."""
    over_since_seconds: float | None = None
    """When the engine started to exceed its budget, or None while it does not."""
    over_since_busy_seconds: float = 0.0
    """The value of `busy_seconds` when the excess began."""
    levels: tuple[tuple[float, int], ...] = ()
    """Pairs of a time and the bytes held at that time, over the last minutes."""
    first_excess_bytes: float = 0.0
    """The excess at rest, measured over the first minutes of the excess."""
    peak_bytes: int = 0
    """The highest peak of used memory above the level after the peak."""
    profile_peak_bytes: int = 0
    """Memory of vLLM's profile run that torch has not reserved yet, or 0 if unknown."""


def update_budgets(
    budgets: dict[str, GpuBudget],
    snapshot: Snapshot,
    run: EngineRun,
    configured_bytes: float | None,
) -> dict[str, GpuBudget]:
    """Add one sample to the GPUs' budgets, and return the budgets by UUID.

    A budget does not change while the engine:

    - sleeps
    - has not processed a request yet
    - returns no page
    """
    page = snapshot.page
    if page is None or run.has_worked is False or run.lost_roles:
        return budgets
    if is_page_awake(page) is False:
        return budgets
    # A GPU without a figure in this sample keeps its old entry.
    sampled = {}
    for gpu in snapshot.owned_gpus:
        memory = gpu.reading.memory
        if memory is None or gpu.held_bytes is None:
            continue
        budget_bytes = find_budget(page, memory.total_bytes, configured_bytes)
        if budget_bytes is not None:
            uuid = gpu.reading.uuid
            sampled[uuid] = _update_budget(budgets.get(uuid), gpu, snapshot, budget_bytes)
    return limit_remembered({**budgets, **sampled}, sampled)


def _update_budget(
    previous: GpuBudget | None, gpu: Gpu, snapshot: Snapshot, budget_bytes: float
) -> GpuBudget:
    """Return a GPU's budget after one more sample.

    The record starts over if the budget in bytes has changed.
    """
    now = snapshot.monotonic_seconds
    if previous is None or previous.budget_bytes != budget_bytes:
        previous = GpuBudget(budget_bytes=budget_bytes, newest_seconds=now)
    busy_seconds = previous.busy_seconds
    if _are_requests_running(snapshot):
        # The engine may have been idle between two samples that are far apart. Only a limited time
        # is therefore counted.
        busy_seconds += min(max(0.0, now - previous.newest_seconds), LONGEST_STEP_SECONDS)
    held_bytes = gpu.held_bytes or 0
    over_since_seconds = None
    over_since_busy_seconds = busy_seconds
    if _is_over(previous, held_bytes):
        over_since_seconds = now
        if previous.over_since_seconds is not None:
            over_since_seconds = previous.over_since_seconds
            over_since_busy_seconds = previous.over_since_busy_seconds
    levels = _add_level(previous.levels, now, held_bytes)
    first_excess_bytes = previous.first_excess_bytes
    # An excess has not settled in its first minutes. Part of a recent excess may be a burst.
    if over_since_seconds is not None and now - over_since_seconds <= REST_SECONDS:
        first_excess_bytes = _find_level(levels, over_since_seconds) - budget_bytes
    return GpuBudget(
        budget_bytes=budget_bytes,
        newest_seconds=now,
        busy_seconds=busy_seconds,
        over_since_seconds=over_since_seconds,
        over_since_busy_seconds=over_since_busy_seconds,
        levels=levels,
        first_excess_bytes=first_excess_bytes,
        peak_bytes=max(previous.peak_bytes, _find_peak(gpu)),
        profile_peak_bytes=_find_profile_peak(gpu, snapshot),
    )


def _add_level(
    levels: tuple[tuple[float, int], ...], now: float, held_bytes: int
) -> tuple[tuple[float, int], ...]:
    """Return the levels of the last few minutes; add `held_bytes` at most once per slot."""
    if levels and 0 <= now - levels[-1][0] < REST_SLOT_SECONDS:
        return levels
    recent_levels = [level for level in levels if 0 <= now - level[0] <= REST_SECONDS]
    return (*recent_levels, (now, held_bytes))


def _find_level(levels: tuple[tuple[float, int], ...], since_seconds: float) -> float:
    """Return the median level since a given time.

    If no level is that recent, the newest level is returned.
    """
    sizes = [held_bytes for at_seconds, held_bytes in levels if at_seconds >= since_seconds]
    return median(sizes or [levels[-1][1]])


def _is_over(previous: GpuBudget, held_bytes: int) -> bool:
    """Return whether the engine exceeds its budget.

    An excess ends only below RESUMED_SHARE of the minimum excess.
    """
    least_excess_bytes = max(OVER_BUDGET_BYTES, OVER_BUDGET_RATIO * previous.budget_bytes)
    if previous.over_since_seconds is not None:
        least_excess_bytes *= RESUMED_SHARE
    return held_bytes - previous.budget_bytes >= least_excess_bytes


def _are_requests_running(snapshot: Snapshot) -> bool:
    """Return whether any request is running, or True if this is unknown."""
    return any(engine.running != 0 for engine in list_engines(snapshot.page))


def _find_peak(gpu: Gpu) -> int:
    """Return the last minute's peak above the current use, or 0 if unknown."""
    memory = gpu.reading.memory
    if memory is None or gpu.reading.used_peak_bytes is None:
        return 0
    # Other processes use this GPU, so one of them may have caused the peak.
    if gpu.other_bytes:
        return 0
    peak_bytes = gpu.reading.used_peak_bytes - memory.used_bytes
    if peak_bytes > LARGEST_PEAK_RATIO * memory.total_bytes:
        return 0
    return max(0, peak_bytes)


def _find_profile_peak(gpu: Gpu, snapshot: Snapshot) -> int:
    """Return the memory that the profile run needed beyond what torch holds for activations."""
    if gpu.inside is None or isinstance(snapshot.probe, Failure | None):
        return 0
    parts = dict(gpu.inside.parts)
    if not all(part in parts for part in WORKING_PARTS):
        return 0
    profiled_bytes = _find_largest_profile(snapshot.probe)
    return max(0, profiled_bytes - sum(parts[part] for part in WORKING_PARTS))


def _find_largest_profile(probe: ProbeReadings) -> int:
    """Return the largest activation peak in vLLM's profile run, or 0 if unknown."""
    peaks_bytes = [
        process.parts.activation_peak_bytes or 0
        for process in probe.present
        if process.parts is not None
    ]
    return max(peaks_bytes, default=0)


def describe_excess(budget: GpuBudget, gpu: Gpu, now: float) -> BudgetExcess | None:
    """Return the engine's excess over its budget on a GPU, and its duration.

    Returns None if there is no excess, or if the memory is unknown. Also returns None for an excess
    above LARGEST_EXCESS_RATIO, because the real budget must be a different one.
    """
    memory = gpu.reading.memory
    if budget.over_since_seconds is None or memory is None:
        return None
    over_since_seconds = budget.over_since_seconds
    excess_bytes = _find_level(budget.levels, over_since_seconds) - budget.budget_bytes
    if excess_bytes > LARGEST_EXCESS_RATIO * budget.budget_bytes:
        return None
    # The engine needs the largest of three peaks: observed, in the profile run, and usual.
    needed_bytes = max(
        budget.peak_bytes,
        budget.profile_peak_bytes,
        USUAL_PEAK_RATIO * memory.total_bytes,
    )
    return BudgetExcess(
        budget_bytes=int(budget.budget_bytes),
        excess_bytes=max(0, int(excess_bytes)),
        first_excess_bytes=max(0, int(budget.first_excess_bytes)),
        total_bytes=memory.total_bytes,
        seconds=now - over_since_seconds,
        is_from_start=budget.over_since_busy_seconds <= FIRST_TRAFFIC_SECONDS,
        needed_bytes=int(needed_bytes),
    )
