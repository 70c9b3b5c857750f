"""Judge the limits that do not need a baseline, except those on leaks."""

from collections.abc import Iterator

from vllm_headroom.derive.life.causes import judge_ending
from vllm_headroom.derive.per_request import BASELINE_READINGS
from vllm_headroom.units import format_instant, format_size
from vllm_headroom.vocabulary import IncidentKind
from vllm_headroom_tools.check.judgement import (
    COST,
    DISCREPANCY,
    PREEMPTIONS,
    RESTARTS,
    Judgement,
    Unit,
    compare_with_limit,
)
from vllm_headroom_tools.check.record import (
    LEAST_TRACE_REQUESTS,
    Budget,
    Cost,
    SignedDiscrepancy,
    TraceRecord,
    find_doubt,
    find_gap,
    find_shortfall,
    pair_gpus,
)
from vllm_headroom_tools.conclusion import Conclusion


def judge_discrepancies(
    record: TraceRecord, baseline: TraceRecord | None, limit: float
) -> Iterator[Judgement]:
    """Judge the largest amount by which each GPU exceeds its budget.

    A GPU without a budget cannot be judged.
    """
    for gpu, baseline_gpu in pair_gpus(record, baseline):
        doubt = find_doubt(record, gpu.budget_coverage, gpu.name)
        if not _has_budget(record):
            doubt = (
                "the trace does not contain the engine's budget: "
                "give --gpu-memory-utilization or --reported-bytes"
            )
        discrepancy = gpu.highest_discrepancy
        value = None if discrepancy is None else discrepancy.ratio
        baseline_value = None
        if baseline_gpu is not None and baseline_gpu.highest_discrepancy is not None:
            baseline_value = baseline_gpu.highest_discrepancy.ratio
        yield Judgement(
            limit=DISCREPANCY,
            subject=gpu.name,
            verdict=compare_with_limit(value, limit, doubt),
            unit=Unit.RATIO,
            value=value,
            highest_allowed=limit,
            baseline=baseline_value,
            bound_text=f"{100 * limit:.3g}%",
            reason=doubt or _describe_discrepancy(discrepancy),
        )


def _has_budget(record: TraceRecord) -> bool:
    """Return whether the operator or the engine itself has set a budget."""
    if record.budget != Budget():
        return True
    return any(gpu.highest_discrepancy is not None for gpu in record.gpus)


def _describe_discrepancy(discrepancy: SignedDiscrepancy | None) -> str:
    """Return the highest discrepancy and its time as text.

    Returns "" if there is none.
    """
    if discrepancy is None:
        return ""
    size = format_size(abs(discrepancy.n_bytes))
    side = "over" if discrepancy.n_bytes > 0 else "under"
    time = format_instant(discrepancy.seconds)
    return f"at the highest {size} {side} what was reported, at {time}"


def judge_costs(
    record: TraceRecord, baseline: TraceRecord | None, limit_bytes: float
) -> Iterator[Judgement]:
    """Judge the memory per running request on each GPU at the highest sustained load.

    The memory cannot be judged without a long enough trace and a sustained load.
    """
    for gpu, baseline_gpu in pair_gpus(record, baseline):
        cost = gpu.busiest_cost
        baseline_cost = None if baseline_gpu is None else baseline_gpu.busiest_cost
        doubt = find_doubt(record, gpu.coverage, gpu.name)
        if cost is None and doubt is None:
            doubt = (
                f"no load has {BASELINE_READINGS} readings, after {LEAST_TRACE_REQUESTS:,.0f}"
                " requests: run each for longer"
            )
        value = None if cost is None else cost.bytes_per_request
        # In a short trace, few requests run at once, so each request costs more. Such a high cost
        # must not make the check fail.
        comparable_value = None if find_shortfall(record) else value
        reason = doubt or ""
        if cost is not None and doubt is None:
            reason = f"{format_size(cost.held_bytes)} held at this load"
        yield Judgement(
            limit=COST,
            subject=gpu.name,
            verdict=compare_with_limit(comparable_value, limit_bytes, doubt),
            value=value,
            highest_allowed=limit_bytes,
            baseline=None if baseline_cost is None else baseline_cost.bytes_per_request,
            value_text=_format_cost(cost),
            baseline_text=_format_cost(baseline_cost),
            reason=reason,
        )


def _format_cost(cost: Cost | None) -> str | None:
    """Return the memory per running request for the report.

    Returns None if it was not measured.
    """
    if cost is None:
        return None
    return f"{format_size(cost.bytes_per_request)} at {cost.running:.3g} running"


def judge_preemptions(
    record: TraceRecord, baseline: TraceRecord | None, limit: float
) -> Iterator[Judgement]:
    """Judge the preemptions per thousand requests.

    A trace with too few requests for a verdict may still fail. The trace fails if further requests
    without a preemption could not lower the rate enough.
    """
    doubt = find_doubt(record, record.engine_coverage, "the engine")
    value = compute_preemption_rate(record)
    if value is None:
        verdict = Conclusion.CANNOT_TELL
        reason = doubt or "the engine does not report its preemptions"
    else:
        preemptions = record.preemptions.total or 0.0
        requests = record.finished_requests.total or 0.0
        # The value below would be the rate if enough requests finished and no more preemptions
        # occurred.
        value_after_enough = 1000 * preemptions / max(requests, LEAST_TRACE_REQUESTS)
        verdict = compare_with_limit(value_after_enough, limit, doubt)
        counts = f"{preemptions:,.0f} in all, of {requests:,.0f} requests"
        reason = counts
        if doubt is not None and verdict is not Conclusion.NOT_GOOD:
            reason = doubt
            if value > limit:
                reason += f"; above the limit so far, {counts}"
    yield Judgement(
        limit=PREEMPTIONS,
        verdict=verdict,
        unit=Unit.COUNT,
        value=value,
        highest_allowed=limit,
        baseline=None if baseline is None else compute_preemption_rate(baseline),
        reason=reason,
    )


def compute_preemption_rate(record: TraceRecord) -> float | None:
    """Return the preemptions per thousand requests.

    Returns None if preemptions are not reported, or if no request finished.
    """
    requests = record.finished_requests.total
    preemptions = record.preemptions.total
    if preemptions is None or not requests:
        return None
    return 1000 * preemptions / requests


def judge_restarts(
    record: TraceRecord, baseline: TraceRecord | None, limit: float
) -> Iterator[Judgement]:
    """Judge the number of engine restarts; the reason names the causes of the exits."""
    doubt = find_shortfall(record) or find_gap(record, record.engine_coverage, "the engine")
    causes = [
        judge_ending(event)[0].sentence
        for event in record.replay.events
        if event.kind is IncidentKind.ENDED
    ]
    yield Judgement(
        limit=RESTARTS,
        verdict=compare_with_limit(record.restarts, limit, doubt),
        unit=Unit.COUNT,
        value=float(record.restarts),
        highest_allowed=limit,
        baseline=None if baseline is None else float(baseline.restarts),
        reason=doubt or " ".join(dict.fromkeys(causes)),
    )
