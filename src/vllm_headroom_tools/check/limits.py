"""What became of a limit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Final

from msgspec import Struct

from vllm_headroom.derive.per_request import READINGS
from vllm_headroom.units import instant, size
from vllm_headroom.vocabulary import MemoryPart
from vllm_headroom_tools.check.record import (
    LEAST_REQUESTS,
    Cost,
    Excess,
    MemorySeries,
    Record,
    doubt,
    paired,
    too_little,
    unread,
)
from vllm_headroom_tools.conclusion import Conclusion, worst


class Unit(StrEnum):
    """What a figure counts."""

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
HOST_GROWTH: Final = "host memory over baseline"
CAPACITY: Final = "KV cache against baseline"
PART_GROWTH: Final = "part over baseline"
"""The names of the limits."""


class Judgement(Struct, frozen=True, kw_only=True):
    """One limit on one GPU, role or engine, which `of` names; it is empty where the limit is on all together.

    `value`, its bounds `most` and `least` and `baseline` are in `unit`, None where unknown or where there is none.
    `found`, `allowed` and `before` say value, bound and baseline to people where they are more than the figure in its
    unit. `why` says what it was measured on, or what is missing.
    """

    limit: str
    of: str = ""
    verdict: Conclusion
    unit: Unit
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
        """The limit and what it is on."""
        return f"{self.limit}, {self.of}" if self.of else self.limit

    @property
    def words(self) -> tuple[str, str, str]:
        """What was found, what is allowed, and what the baseline had; empty where there is none of the last two."""
        return (
            self.found or written(self.value, self.unit) or "unknown",
            self.allowed or written(self.most, self.unit),
            self.before or written(self.baseline, self.unit),
        )


def written(figure: float | None, unit: Unit) -> str:
    """Return a figure for people; nothing where there is none."""
    if figure is None:
        return ""
    match unit:
        case Unit.BYTES:
            return size(figure)
        case Unit.RATIO:
            return f"{figure:+.2%}"
        case Unit.TOKENS:
            return f"{figure:,.0f} tokens"
        case Unit.COUNT:
            return f"{figure:.3g}" if figure < 1000 else f"{figure:,.0f}"  # noqa: PLR2004 - from there on 1e+03


def overall(judgements: Iterable[Judgement]) -> Conclusion:
    """Return failed if any limit is exceeded, else that it cannot be told if one cannot, else passed."""
    return worst(judgement.verdict for judgement in judgements)


def compared(value: float | None, most: float | None, doubt: str | None) -> Conclusion:
    """Return what a value amounts to: above the limit it fails in any case, below it passes only without a doubt."""
    if value is None or most is None:
        return Conclusion.CANNOT_TELL
    if value > most:
        return Conclusion.NOT_GOOD
    return Conclusion.GOOD if doubt is None else Conclusion.CANNOT_TELL


NO_REPORT: Final = (
    "the trace does not say what the engine was told to use: give --gpu-memory-utilization or --reported-bytes"
)


def discrepancies(record: Record, before: Record | None, most: float) -> Iterator[Judgement]:
    """Yield the highest discrepancy of each GPU; nothing can be told where it was not said what to expect."""
    for gpu, past in paired(record, before):
        value = None if gpu.excess is None else gpu.excess.ratio
        missing = doubt(record, gpu.told, gpu.name) if record.expects else NO_REPORT
        yield Judgement(
            limit=DISCREPANCY,
            of=gpu.name,
            verdict=compared(value, most, missing),
            unit=Unit.RATIO,
            value=value,
            most=most,
            baseline=None if past is None or past.excess is None else past.excess.ratio,
            allowed=f"{100 * most:.3g}%",
            why=missing or _excess_words(gpu.excess),
        )


def _excess_words(excess: Excess | None) -> str:
    if excess is None:
        return ""
    side = "over" if excess.n_bytes > 0 else "under"
    return f"at the highest {size(abs(excess.n_bytes))} {side} what was reported, at {instant(excess.seconds)}"


def costs(record: Record, before: Record | None, most: float) -> Iterator[Judgement]:
    """Yield what a running request costs on each GPU at the highest load with enough readings."""
    for gpu, past in paired(record, before):
        cost, old = gpu.busiest, None if past is None else past.busiest
        missing = doubt(record, gpu.coverage, gpu.name)
        if cost is None and missing is None:
            missing = f"no load has {READINGS} readings, after {LEAST_REQUESTS:,.0f} requests: run each for longer"
        value = None if cost is None else cost.bytes_per_request
        comparable = None if too_little(record) else value  # full load was hardly reached
        yield Judgement(
            limit=COST,
            of=gpu.name,
            verdict=compared(comparable, most, missing),
            unit=Unit.BYTES,
            value=value,
            most=most,
            baseline=None if old is None else old.bytes_per_request,
            found=_at_load(cost),
            before=_at_load(old),
            why=missing or ("" if cost is None else f"{size(cost.held_bytes)} held at this load"),
        )


def _at_load(cost: Cost | None) -> str | None:
    return None if cost is None else f"{size(cost.bytes_per_request)} at {cost.running:.3g} running"


def preemptions(record: Record, before: Record | None, most: float) -> Iterator[Judgement]:
    """Yield how often a request was preempted.

    Of few requests it is exceeded only where it would be if all that are missing to enough had come without one.
    """
    missing = doubt(record, record.engine, "the engine")
    value = per_thousand(record)
    if value is None:
        verdict, why = Conclusion.CANNOT_TELL, missing or "the engine does not say how often it preempted a request"
    else:
        total, done = record.preemptions.total or 0.0, record.finished.total or 0.0
        verdict = compared(1000 * total / max(done, LEAST_REQUESTS), most, missing)
        counted = f"{total:,.0f} in all, of {done:,.0f} requests"
        so_far = f"{missing}; above the limit so far, {counted}" if value > most else missing
        why = counted if missing is None or verdict is Conclusion.NOT_GOOD else so_far or ""
    yield Judgement(
        limit=PREEMPTIONS,
        verdict=verdict,
        unit=Unit.COUNT,
        value=value,
        most=most,
        baseline=None if before is None else per_thousand(before),
        why=why,
    )


def per_thousand(record: Record) -> float | None:
    """Return the preemptions per thousand requests; None where they are unknown or no request finished."""
    done, preempted = record.finished.total, record.preemptions.total
    return None if preempted is None or not done else 1000 * preempted / done


def restarts(record: Record, before: Record | None, most: float) -> Iterator[Judgement]:
    """Yield how often the engine began anew."""
    missing = too_little(record) or unread(record, record.engine, "the engine")
    yield Judgement(
        limit=RESTARTS,
        verdict=compared(record.restarts, most, missing),
        unit=Unit.COUNT,
        value=float(record.restarts),
        most=most,
        baseline=None if before is None else float(before.restarts),
        why=missing or "",
    )


SAME_SIZE: Final = 0.01
"""Within this share two GPUs are of one size: drivers reserve a little more or less."""

COMPARED: Final = (MemoryPart.WEIGHTS, MemoryPart.CUDA_GRAPHS, MemoryPart.OTHER_TENSORS, MemoryPart.OUTSIDE_TORCH)
"""The KV cache takes what these leave, and has its own limit; what is cached or fragmented comes and goes with load."""


def growths(record: Record, before: Record | None, ratio: float) -> Iterator[Judgement]:
    """Yield the growth of each GPU's memory and each role's at the same load, what each KV cache lost, and the parts'.

    A role or an engine that only one of the traces has cannot be compared; there is nothing to say of one that neither
    has.
    """
    if before is None:
        return
    unlike = _unlike(record, before)
    for gpu, past in paired(record, before):
        missing = unlike or _doubt(record, gpu, before, past)
        yield _growth(GROWTH, gpu.name, gpu, past, ratio=ratio, missing=missing)
    for role in sorted(record.host.keys() | before.host.keys()):
        here, there = record.host.get(role), before.host.get(role)
        missing = unlike or _doubt(record, here, before, there)
        yield _growth(HOST_GROWTH, role, here, there, ratio=ratio, missing=missing)
    for engine in sorted(record.capacity_tokens.keys() | before.capacity_tokens.keys()):
        yield _capacity(engine, record.capacity_tokens.get(engine), before.capacity_tokens.get(engine), ratio, unlike)
    for gpu, past in paired(record, before):
        yield from () if past is None else _parts(gpu, past, ratio)


def _unlike(record: Record, before: Record) -> str | None:
    """Return why no figure of the two traces can be compared."""
    if record.models != before.models:
        return f"the baseline is of another model: {_names(before)} there, {_names(record)} here"
    if len(record.gpus) != len(before.gpus):
        return f"the baseline has {len(before.gpus)} GPUs, this trace {len(record.gpus)}"
    return None


def _names(record: Record) -> str:
    return ", ".join(sorted(record.models)) or "none"


def _doubt(record: Record, series: MemorySeries | None, before: Record, past: MemorySeries | None) -> str | None:
    """Return why this figure of the two traces cannot be compared."""
    if series is None:
        return "only the baseline has it"
    if past is None:
        return "the baseline does not have it"
    here, there = series.total_bytes, past.total_bytes
    if here is not None and there is not None and abs(here - there) > SAME_SIZE * there:
        return f"the baseline is of another kind of GPU: {size(there)} there, {size(here)} here"
    old = doubt(before, past.coverage, past.name)
    return doubt(record, series.coverage, series.name) or (old and f"the baseline: {old}")


def _growth(
    limit: str, name: str, series: MemorySeries | None, past: MemorySeries | None, *, ratio: float, missing: str | None
) -> Judgement:
    """Return the greatest growth of a series among the loads that both traces have."""
    pair = None if missing else _greatest(series, past)
    if pair is None and missing is None:
        missing = f"no load in common: {_loads(series)} here, {_loads(past)} in the baseline"
    now, then = (None, None) if pair is None else (pair[0].held_bytes, pair[1].held_bytes)
    most = None if then is None else then * (1 + ratio)
    return Judgement(
        limit=limit,
        of=name,
        verdict=compared(now, most, missing),
        unit=Unit.BYTES,
        value=now,
        most=most,
        allowed=f"{100 * ratio:.3g}% more",
        baseline=then,
        found=_change(now, then, Unit.BYTES),
        why=missing or (f"at {pair[0].running:.3g} running, and {pair[1].running:.3g} in the baseline" if pair else ""),
    )


def _greatest(series: MemorySeries | None, past: MemorySeries | None) -> tuple[Cost, Cost] | None:
    here, there = ({} if each is None else each.costs for each in (series, past))
    pairs = [(here[band], there[band]) for band in here.keys() & there.keys()]
    return max(pairs, key=lambda pair: (pair[0].held_bytes / pair[1].held_bytes, pair[0].running), default=None)


def _loads(series: MemorySeries | None) -> str:
    running = [] if series is None else [cost.running for cost in series.costs.values()]
    if not running:
        return "none that lasted"
    return f"{running[0]:.3g} to {running[-1]:.3g} running" if len(running) > 1 else f"{running[0]:.3g} running"


def _capacity(engine: str, now: float | None, then: float | None, ratio: float, unlike: str | None) -> Judgement:
    """Return what an engine's KV cache lost: its budget stays, so what else grew was taken from it."""
    missing = unlike
    if now is None or then is None:
        missing = missing or ("only the baseline has it" if now is None else "the baseline does not have it")
    least = None if missing or then is None else then * (1 - ratio)
    return Judgement(
        limit=CAPACITY,
        of=f"engine {engine}",
        verdict=compared(None if now is None else -now, None if least is None else -least, missing),
        unit=Unit.TOKENS,
        value=now,
        least=least,
        allowed=f"{100 * ratio:.3g}% less",
        baseline=then,
        found=_change(now, then, Unit.TOKENS),
        why=missing or "",
    )


def _change(now: float | None, then: float | None, unit: Unit) -> str | None:
    return f"{written(now, unit)}, {now / then - 1:+.2%}" if now is not None and then else None


def _parts(gpu: MemorySeries, past: MemorySeries, ratio: float) -> Iterator[Judgement]:
    """Yield the growth of each part that both traces know, by a share of what the parts of the baseline are together.

    A part alone may be small: twice as much of little is nothing.
    """
    here, there = gpu.parts.of(), past.parts.of()
    for part in (part for part in COMPARED if part in here and part in there):
        now, then = here[part], there[part]
        most = then + ratio * sum(there.values())
        yield Judgement(
            limit=PART_GROWTH,
            of=f"{gpu.name}, {part}",
            verdict=compared(now, most, None),
            unit=Unit.BYTES,
            value=now,
            most=most,
            baseline=then,
            found=f"{size(now)}, {now - then:+,.0f} bytes",
            why="by the probe inside the engine, the mean while it served",
        )
