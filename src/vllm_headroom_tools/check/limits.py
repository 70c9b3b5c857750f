"""Limits on a trace, and how each is judged."""

from collections.abc import Iterator
from enum import StrEnum
from statistics import fmean
from typing import Final

from msgspec import Struct

from vllm_headroom.derive.life.causes import judge_ending
from vllm_headroom.derive.per_request import BASELINE_READINGS
from vllm_headroom.units import format_instant, format_size
from vllm_headroom.vocabulary import IncidentKind, MemoryPart
from vllm_headroom_tools.check.record import (
    LEAST_REQUESTS,
    Budget,
    Cost,
    MemorySeries,
    TraceRecord,
    find_doubt,
    find_gap,
    find_shortfall,
    pair_gpus,
)
from vllm_headroom_tools.conclusion import Conclusion


class Unit(StrEnum):
    """The unit of a figure."""

    BYTES = "bytes"
    RATIO = "ratio"
    TOKENS = "tokens"
    COUNT = "count"


LEAK: Final = "leak per thousand requests"
HOST_LEAK: Final = "host leak per thousand requests"
DISCREPANCY: Final = "discrepancy"
COST: Final = "bytes per running request"
PREEMPTIONS: Final = "preemptions per thousand requests"
RESTARTS: Final = "engine restarts"
GROWTH: Final = "GPU memory over baseline"
"""The names of the limits."""


class Judgement(Struct, frozen=True, kw_only=True):
    """One limit on the GPU, role or engine that `of` names; empty: on all of them together.

    `value`, its bounds and `baseline` are in `unit`, None where unknown or absent. `found`, `allowed` and `before` are
    value, bound and baseline as text where the figure is not enough. `why` is the basis, or what is missing.
    """

    limit: str
    of: str = ""
    verdict: Conclusion
    unit: Unit = Unit.BYTES
    value: float | None = None
    most: float | None = None
    least: float | None = None
    baseline: float | None = None
    found: str | None = None
    allowed: str | None = None
    before: str | None = None
    why: str = ""

    @property
    def name(self) -> str:
        """The limit and its subject."""
        return f"{self.limit}, {self.of}" if self.of else self.limit

    @property
    def words(self) -> tuple[str, str, str]:
        """Value, bound and baseline as text; the last two may be empty."""
        return (
            self.found or format_figure(self.value, self.unit) or "unknown",
            self.allowed or format_figure(self.most, self.unit),
            self.before or format_figure(self.baseline, self.unit),
        )


def format_figure(figure: float | None, unit: Unit) -> str:
    """Format a figure; return an empty text for None."""
    if figure is None:
        return ""
    match unit:
        case Unit.BYTES:
            return format_size(figure)
        case Unit.RATIO:
            return f"{figure:+.2%}"
        case Unit.TOKENS:
            return f"{figure:,.0f} tokens"
        case Unit.COUNT:
            return f"{figure:.3g}" if figure < 1000 else f"{figure:,.0f}"  # noqa: PLR2004 - from there on 1e+03


def compare(value: float | None, most: float | None, doubt: str | None) -> Conclusion:
    """Compare a value with its limit: above it fails in any case, below it passes only without a doubt."""
    if value is None or most is None:
        return Conclusion.CANNOT_TELL
    if value > most:
        return Conclusion.NOT_GOOD
    return Conclusion.GOOD if doubt is None else Conclusion.CANNOT_TELL


def judge_discrepancies(
    record: TraceRecord, before: TraceRecord | None, most: float
) -> Iterator[Judgement]:
    """Judge the highest discrepancy of each GPU; without a budget it cannot be judged."""
    no_budget = "the trace does not contain the engine's budget: give --gpu-memory-utilization or --reported-bytes"
    has_budget = record.budget != Budget() or any(gpu.excess for gpu in record.gpus)
    for gpu, past in pair_gpus(record, before):
        value = None if gpu.excess is None else gpu.excess.ratio
        missing = find_doubt(record, gpu.budgeted, gpu.name) if has_budget else no_budget
        why = ""
        if gpu.excess is not None:
            most_bytes, side = (
                abs(gpu.excess.n_bytes),
                "over" if gpu.excess.n_bytes > 0 else "under",
            )
            at = format_instant(gpu.excess.seconds)
            why = f"at the highest {format_size(most_bytes)} {side} what was reported, at {at}"
        yield Judgement(
            limit=DISCREPANCY,
            of=gpu.name,
            verdict=compare(value, most, missing),
            unit=Unit.RATIO,
            value=value,
            most=most,
            baseline=None if past is None or past.excess is None else past.excess.ratio,
            allowed=f"{100 * most:.3g}%",
            why=missing or why,
        )


def judge_costs(
    record: TraceRecord, before: TraceRecord | None, most: float
) -> Iterator[Judgement]:
    """Judge the memory per running request on each GPU at the highest load with enough readings."""
    for gpu, past in pair_gpus(record, before):
        cost, old = gpu.busiest, None if past is None else past.busiest
        missing = find_doubt(record, gpu.coverage, gpu.name)
        if cost is None and missing is None:
            missing = f"no load has {BASELINE_READINGS} readings, after {LEAST_REQUESTS:,.0f} requests: run each for longer"
        value = None if cost is None else cost.bytes_per_request
        comparable = None if find_shortfall(record) else value  # full load was hardly reached
        yield Judgement(
            limit=COST,
            of=gpu.name,
            verdict=compare(comparable, most, missing),
            value=value,
            most=most,
            baseline=None if old is None else old.bytes_per_request,
            found=_format_cost(cost),
            before=_format_cost(old),
            why=missing
            or ("" if cost is None else f"{format_size(cost.held_bytes)} held at this load"),
        )


def _format_cost(cost: Cost | None) -> str | None:
    return (
        None
        if cost is None
        else f"{format_size(cost.bytes_per_request)} at {cost.running:.3g} running"
    )


def judge_preemptions(
    record: TraceRecord, before: TraceRecord | None, most: float
) -> Iterator[Judgement]:
    """Judge the preemptions per thousand requests.

    With few requests it fails only if it would still fail after enough requests without a preemption.
    """
    missing = find_doubt(record, record.engine, "the engine")
    value = compute_preemption_rate(record)
    if value is None:
        verdict, why = (
            Conclusion.CANNOT_TELL,
            missing or "the engine does not report its preemptions",
        )
    else:
        total, done = record.preemptions.total or 0.0, record.finished.total or 0.0
        verdict = compare(1000 * total / max(done, LEAST_REQUESTS), most, missing)
        counted = f"{total:,.0f} in all, of {done:,.0f} requests"
        so_far = f"{missing}; above the limit so far, {counted}" if value > most else missing
        why = counted if missing is None or verdict is Conclusion.NOT_GOOD else so_far or ""
    yield Judgement(
        limit=PREEMPTIONS,
        verdict=verdict,
        unit=Unit.COUNT,
        value=value,
        most=most,
        baseline=None if before is None else compute_preemption_rate(before),
        why=why,
    )


def compute_preemption_rate(record: TraceRecord) -> float | None:
    """Return the preemptions per thousand requests; None where unknown or no request finished."""
    done, preempted = record.finished.total, record.preemptions.total
    return None if preempted is None or not done else 1000 * preempted / done


def judge_restarts(
    record: TraceRecord, before: TraceRecord | None, most: float
) -> Iterator[Judgement]:
    """Judge the restarts of the engine."""
    missing = find_shortfall(record) or find_gap(record, record.engine, "the engine")
    causes = (
        judge_ending(end)[0].sentence
        for end in record.replay.events
        if end.kind is IncidentKind.ENDED
    )
    yield Judgement(
        limit=RESTARTS,
        verdict=compare(record.replay.engine.runs.restarts, most, missing),
        unit=Unit.COUNT,
        value=float(record.replay.engine.runs.restarts),
        most=most,
        baseline=None if before is None else float(before.replay.engine.runs.restarts),
        why=missing or " ".join(dict.fromkeys(causes)),
    )


SAME_SIZE: Final = 0.01
"""Two GPUs within this share have the same size: drivers reserve a little more or less."""

COMPARED: Final = (
    MemoryPart.WEIGHTS,
    MemoryPart.CUDA_GRAPHS,
    MemoryPart.OTHER_TENSORS,
    MemoryPart.OUTSIDE_TORCH,
)
"""The KV cache takes what these leave and has its own limit; cached and fragmented memory varies with load."""


def judge_growths(
    record: TraceRecord, before: TraceRecord | None, ratio: float
) -> Iterator[Judgement]:
    """Judge the growth of each GPU, role and part at the same load, and the loss of each KV cache.

    A role or an engine that only one of the traces has cannot be judged.
    """
    if before is None:
        return
    unlike = None
    if record.models != before.models:
        other, this = (", ".join(sorted(each.models)) or "none" for each in (before, record))
        unlike = f"the baseline is of another model: {other} there, {this} here"
    elif len(record.gpus) != len(before.gpus):
        unlike = f"the baseline has {len(before.gpus)} GPUs, this trace {len(record.gpus)}"
    for gpu, past in pair_gpus(record, before):
        missing = unlike or _find_doubt(record, gpu, before, past)
        yield _judge_growth(GROWTH, gpu.name, gpu, past, ratio=ratio, missing=missing)
    for role in sorted(record.host.keys() | before.host.keys()):
        here, there = record.host.get(role), before.host.get(role)
        missing = unlike or _find_doubt(record, here, before, there)
        yield _judge_growth(
            "host memory over baseline", role, here, there, ratio=ratio, missing=missing
        )
    for engine in sorted(record.capacity_tokens.keys() | before.capacity_tokens.keys()):
        yield _judge_capacity(
            engine,
            record.capacity_tokens.get(engine),
            before.capacity_tokens.get(engine),
            ratio,
            unlike,
        )
    for gpu, past in pair_gpus(record, before):
        yield from () if past is None else _judge_parts(gpu, past, ratio)


def _find_doubt(
    record: TraceRecord, series: MemorySeries | None, before: TraceRecord, past: MemorySeries | None
) -> str | None:
    if series is None:
        return "only the baseline has it"
    if past is None:
        return "the baseline does not have it"
    here, there = series.total_bytes, past.total_bytes
    if here is not None and there is not None and abs(here - there) > SAME_SIZE * there:
        return f"the baseline is of another kind of GPU: {format_size(there)} there, {format_size(here)} here"
    old = find_doubt(before, past.coverage, past.name)
    return find_doubt(record, series.coverage, series.name) or (old and f"the baseline: {old}")


def _judge_growth(
    limit: str,
    name: str,
    series: MemorySeries | None,
    past: MemorySeries | None,
    *,
    ratio: float,
    missing: str | None,
) -> Judgement:
    """Judge the largest growth of a series among the loads that both traces have."""
    pairs: list[tuple[Cost, Cost]] = []
    if series is not None and past is not None and missing is None:
        here, there = series.costs, past.costs
        pairs = [(here[band], there[band]) for band in here.keys() & there.keys()]
    pair = max(
        pairs,
        key=lambda each: (each[0].held_bytes / each[1].held_bytes, each[0].running),
        default=None,
    )
    if pair is None and missing is None:
        missing = f"no load in common: {_describe_loads(series)} here, {_describe_loads(past)} in the baseline"
    now, then = (None, None) if pair is None else (pair[0].held_bytes, pair[1].held_bytes)
    most = None if then is None else then * (1 + ratio)
    return Judgement(
        limit=limit,
        of=name,
        verdict=compare(now, most, missing),
        value=now,
        most=most,
        allowed=f"{100 * ratio:.3g}% more",
        baseline=then,
        found=_format_change(now, then, Unit.BYTES),
        why=missing
        or (
            f"at {pair[0].running:.3g} running, and {pair[1].running:.3g} in the baseline"
            if pair
            else ""
        ),
    )


def _describe_loads(series: MemorySeries | None) -> str:
    running = [] if series is None else [f"{cost.running:.3g}" for cost in series.costs.values()]
    return (
        " to ".join(dict.fromkeys((running[0], running[-1]))) + " running"
        if running
        else "none that lasted"
    )


def _judge_capacity(
    engine: str, now: float | None, then: float | None, ratio: float, unlike: str | None
) -> Judgement:
    """Judge the size of an engine's KV cache: within a fixed budget it shrinks by what else grows."""
    missing = unlike
    if now is None or then is None:
        missing = missing or (
            "only the baseline has it" if now is None else "the baseline does not have it"
        )
    least = None if missing or then is None else then * (1 - ratio)
    return Judgement(
        limit="KV cache against baseline",
        of=f"engine {engine}",
        verdict=compare(None if now is None else -now, None if least is None else -least, missing),
        unit=Unit.TOKENS,
        value=now,
        least=least,
        allowed=f"{100 * ratio:.3g}% less",
        baseline=then,
        found=_format_change(now, then, Unit.TOKENS),
        why=missing or "",
    )


def _format_change(now: float | None, then: float | None, unit: Unit) -> str | None:
    return (
        f"{format_figure(now, unit)}, {now / then - 1:+.2%}" if now is not None and then else None
    )


def _judge_parts(gpu: MemorySeries, past: MemorySeries, ratio: float) -> Iterator[Judgement]:
    """Judge each part that both traces have; the share is of all parts together, since a single part may be small."""
    here, there = ({part: fmean(read) for part, read in each.parts.items()} for each in (gpu, past))
    for part in (part for part in COMPARED if part in here and part in there):
        now, then = here[part], there[part]
        most = then + ratio * sum(there.values())
        yield Judgement(
            limit="part over baseline",
            of=f"{gpu.name}, {part}",
            verdict=compare(now, most, None),
            value=now,
            most=most,
            baseline=then,
            found=f"{format_size(now)}, {now - then:+,.0f} bytes",
            why="mean while it served, by the probe inside the engine",
        )
