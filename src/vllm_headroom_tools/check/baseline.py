"""Judge a trace against a baseline.

The baseline is an older version's trace under the same load.
"""

from collections.abc import Iterator
from statistics import fmean
from typing import Final

from msgspec.structs import replace

from vllm_headroom.units import format_size
from vllm_headroom.vocabulary import MemoryPart
from vllm_headroom_tools.check.judgement import (
    GROWTH,
    Judgement,
    Unit,
    compare_with_limit,
    format_figure,
)
from vllm_headroom_tools.check.record import (
    Cost,
    MemorySeries,
    TraceRecord,
    find_doubt,
    pair_gpus,
)
from vllm_headroom_tools.conclusion import Conclusion

SAME_SIZE_RATIO: Final = 0.01
"""GPUs are the same kind if their sizes differ by this share or less. The memory that drivers
reserve varies.
"""

COMPARED_PARTS: Final = (
    MemoryPart.WEIGHTS,
    MemoryPart.CUDA_GRAPHS,
    MemoryPart.OTHER_TENSORS,
    MemoryPart.OUTSIDE_TORCH,
)
"""The parts of GPU memory that are compared. The KV cache is not included. It takes whatever the
other parts leave. It has a separate limit. Cached and fragmented memory is not compared either,
because it varies with load.
"""


def judge_growths(
    record: TraceRecord, baseline: TraceRecord | None, limit_ratio: float
) -> Iterator[Judgement]:
    """Judge each GPU's, role's and part's growth over the baseline at the same load.

    Also judge by how much each KV cache shrank. A role or an engine that is missing in one trace
    cannot be judged. Yields nothing if there is no baseline.
    """
    if baseline is None:
        return
    # If the models or engines differ, nothing can be compared.
    mismatch = _find_mismatch(record, baseline)
    for gpu, baseline_gpu in pair_gpus(record, baseline):
        doubt = mismatch or _find_doubt(record, gpu, baseline, baseline_gpu)
        yield _judge_growth(
            GROWTH, gpu.name, gpu, baseline_gpu, limit_ratio=limit_ratio, doubt=doubt
        )
    for role in sorted(record.host.keys() | baseline.host.keys()):
        series = record.host.get(role)
        baseline_series = baseline.host.get(role)
        doubt = mismatch or _find_doubt(record, series, baseline, baseline_series)
        yield _judge_growth(
            HOST_GROWTH, role, series, baseline_series, limit_ratio=limit_ratio, doubt=doubt
        )
    for engine in sorted(record.capacity_tokens.keys() | baseline.capacity_tokens.keys()):
        tokens = record.capacity_tokens.get(engine)
        baseline_tokens = baseline.capacity_tokens.get(engine)
        yield _judge_capacity(engine, tokens, baseline_tokens, limit_ratio, mismatch)
    for gpu, baseline_gpu in pair_gpus(record, baseline):
        if baseline_gpu is not None:
            yield from _judge_parts(gpu, baseline_gpu, limit_ratio)


def _find_mismatch(record: TraceRecord, baseline: TraceRecord) -> str | None:
    """Return why the two traces cannot be compared, or None if they can."""
    if record.models != baseline.models:
        models = ", ".join(sorted(record.models)) or "none"
        baseline_models = ", ".join(sorted(baseline.models)) or "none"
        return f"the baseline is of another model: {baseline_models} there, {models} here"
    if len(record.gpus) != len(baseline.gpus):
        return f"the baseline has {len(baseline.gpus)} GPUs, this trace {len(record.gpus)}"
    return None


HOST_GROWTH: Final = "host memory over baseline"
ONLY_BASELINE: Final = "only the baseline has it"
NOT_IN_BASELINE: Final = "the baseline does not have it"


def _find_doubt(
    record: TraceRecord,
    series: MemorySeries | None,
    baseline: TraceRecord,
    baseline_series: MemorySeries | None,
) -> str | None:
    """Return why a series cannot be compared with the baseline's.

    Returns None if it can be.
    """
    if series is None:
        return ONLY_BASELINE
    if baseline_series is None:
        return NOT_IN_BASELINE
    # Doubts about the series are checked first, because they are more specific than doubts about
    # the whole trace.
    doubt = _find_size_mismatch(series, baseline_series)
    if doubt is not None:
        return doubt
    doubt = find_doubt(record, series.coverage, series.name)
    if doubt is not None:
        return doubt
    doubt = find_doubt(baseline, baseline_series.coverage, baseline_series.name)
    return None if doubt is None else f"the baseline: {doubt}"


def _find_size_mismatch(series: MemorySeries, baseline_series: MemorySeries) -> str | None:
    """Return a text if two GPUs have different sizes.

    Returns None if the sizes are the same, or if either size is unknown.
    """
    total_bytes = series.total_bytes
    baseline_bytes = baseline_series.total_bytes
    if total_bytes is None or baseline_bytes is None:
        return None
    if abs(total_bytes - baseline_bytes) <= SAME_SIZE_RATIO * baseline_bytes:
        return None
    sizes = f"{format_size(baseline_bytes)} there, {format_size(total_bytes)} here"
    return f"the baseline is of another kind of GPU: {sizes}"


def _judge_growth(
    limit_name: str,
    subject: str,
    series: MemorySeries | None,
    baseline_series: MemorySeries | None,
    *,
    limit_ratio: float,
    doubt: str | None,
) -> Judgement:
    """Judge a series' largest growth at any load that both traces have.

    A series cannot be judged in three cases:

    - There is a doubt.
    - Either of the two series is missing.
    - The two series have no load in common.
    """
    judgement = Judgement(
        limit=limit_name,
        subject=subject,
        verdict=Conclusion.CANNOT_TELL,
        bound_text=f"{100 * limit_ratio:.3g}% more",
        reason=doubt or "",
    )
    if doubt is not None or series is None or baseline_series is None:
        return judgement
    pair = _find_largest_growth(series, baseline_series)
    if pair is None:
        loads = f"{_describe_loads(series)} here, {_describe_loads(baseline_series)}"
        return replace(judgement, reason=f"no load in common: {loads} in the baseline")
    cost, baseline_cost = pair
    highest_allowed = baseline_cost.held_bytes * (1 + limit_ratio)
    running = f"at {cost.running:.3g} running"
    return replace(
        judgement,
        verdict=compare_with_limit(cost.held_bytes, highest_allowed, None),
        value=cost.held_bytes,
        highest_allowed=highest_allowed,
        baseline=baseline_cost.held_bytes,
        value_text=_format_change(cost.held_bytes, baseline_cost.held_bytes, Unit.BYTES),
        reason=f"{running}, and {baseline_cost.running:.3g} in the baseline",
    )


def _find_largest_growth(
    series: MemorySeries, baseline_series: MemorySeries
) -> tuple[Cost, Cost] | None:
    """Return the costs in both traces at the load with the largest growth.

    If several loads have the same growth, the highest load is used. Returns None if the two series
    have no load in common.
    """
    costs = series.costs
    baseline_costs = baseline_series.costs
    # Loads are grouped into bands, and costs are only compared within the same band.
    pairs = [(costs[band], baseline_costs[band]) for band in costs.keys() & baseline_costs.keys()]

    def rank(pair: tuple[Cost, Cost]) -> tuple[float, float]:
        cost, baseline_cost = pair
        return cost.held_bytes / baseline_cost.held_bytes, cost.running

    return max(pairs, key=rank, default=None)


def _describe_loads(series: MemorySeries) -> str:
    """Return the lowest and highest loads of a series as text."""
    running = [f"{cost.running:.3g}" for cost in series.costs.values()]
    if not running:
        return "none that lasted"
    return " to ".join(dict.fromkeys((running[0], running[-1]))) + " running"


def _judge_capacity(
    engine: str,
    tokens: float | None,
    baseline_tokens: float | None,
    limit_ratio: float,
    mismatch: str | None,
) -> Judgement:
    """Judge whether an engine's KV cache shrank by more than the limit.

    Within a fixed budget, the KV cache shrinks as other memory grows.
    """
    doubt = mismatch
    if doubt is None and tokens is None:
        doubt = ONLY_BASELINE
    if doubt is None and baseline_tokens is None:
        doubt = NOT_IN_BASELINE
    lowest_allowed = None
    if doubt is None and baseline_tokens is not None:
        lowest_allowed = baseline_tokens * (1 - limit_ratio)
    # the comparison only supports upper bounds, so the value and the bound are negated
    loss = None if tokens is None else -tokens
    highest_loss = None if lowest_allowed is None else -lowest_allowed
    return Judgement(
        limit="KV cache against baseline",
        subject=f"engine {engine}",
        verdict=compare_with_limit(loss, highest_loss, doubt),
        unit=Unit.TOKENS,
        value=tokens,
        lowest_allowed=lowest_allowed,
        bound_text=f"{100 * limit_ratio:.3g}% less",
        baseline=baseline_tokens,
        value_text=_format_change(tokens, baseline_tokens, Unit.TOKENS),
        reason=doubt or "",
    )


def _format_change(value: float | None, baseline: float | None, unit: Unit) -> str | None:
    """Return a figure and its change in percent.

    Returns None if the change cannot be computed.
    """
    if value is None or not baseline:
        return None
    return f"{format_figure(value, unit)}, {value / baseline - 1:+.2%}"


def _judge_parts(
    gpu: MemorySeries, baseline_gpu: MemorySeries, limit_ratio: float
) -> Iterator[Judgement]:
    """Judge the growth of those parts of GPU memory that both traces have.

    The limit is a share of all parts combined. A share of a single small part would be almost
    nothing.
    """
    parts_bytes = _average_parts(gpu)
    baseline_parts_bytes = _average_parts(baseline_gpu)
    # The limit is a share of the sum of all parts. A small part may therefore grow by a few MiB.
    allowance_bytes = limit_ratio * sum(baseline_parts_bytes.values())
    for part in COMPARED_PARTS:
        if part not in parts_bytes or part not in baseline_parts_bytes:
            continue
        value = parts_bytes[part]
        baseline = baseline_parts_bytes[part]
        yield Judgement(
            limit="part over baseline",
            subject=f"{gpu.name}, {part}",
            verdict=compare_with_limit(value, baseline + allowance_bytes, None),
            value=value,
            highest_allowed=baseline + allowance_bytes,
            baseline=baseline,
            value_text=f"{format_size(value)}, {value - baseline:+,.0f} bytes",
            reason="mean while it served, by the probe inside the engine",
        )


def _average_parts(gpu: MemorySeries) -> dict[MemoryPart, float]:
    """Return the mean size of each part of a GPU's memory.

    The result is empty if the probe measured no parts.
    """
    return {part: fmean(readings) for part, readings in gpu.parts.items()}
