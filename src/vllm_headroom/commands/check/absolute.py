"""The limits on a trace by itself, but for leaks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from vllm_headroom.commands.check.costs import Cost
from vllm_headroom.commands.check.doubts import LEAST_REQUESTS, doubt, too_little, unread
from vllm_headroom.commands.check.excess import Excess
from vllm_headroom.commands.check.judgement import COST, DISCREPANCY, PREEMPTIONS, RESTARTS, Judgement, Unit, compared
from vllm_headroom.commands.check.record import Record, paired
from vllm_headroom.derive.leak.baseline import READINGS
from vllm_headroom.units import instant, size

NO_REPORT: Final = (
    "the trace does not say what the engine was told to use: give --gpu-memory-utilization or --reported-bytes"
)


def discrepancies(record: Record, before: Record | None, most: float) -> Iterator[Judgement]:
    """Yield the highest discrepancy of each GPU; nothing can be told where it was not said what to expect."""
    for uuid, old in paired(record, before):
        name = record.gpus[uuid].name
        excess = record.excesses.highest.get(uuid)
        past = None if before is None or old is None else before.excesses.highest.get(old)
        missing = doubt(record, record.excesses.coverage.get(uuid), name) if record.excesses.expected else NO_REPORT
        yield Judgement(
            limit=DISCREPANCY,
            of=name,
            outcome=compared(None if excess is None else excess.ratio, most, missing),
            unit=Unit.RATIO,
            value=None if excess is None else excess.ratio,
            most=most,
            baseline=None if past is None else past.ratio,
            found=_percent(excess),
            allowed=f"{100 * most:.3g}%",
            before=None if past is None else _percent(past),
            why=missing or _excess_words(excess),
        )


def _percent(excess: Excess | None) -> str:
    return "unknown" if excess is None else f"{excess.ratio:+.2%}"


def _excess_words(excess: Excess | None) -> str:
    if excess is None:
        return ""
    side = "over" if excess.n_bytes > 0 else "under"
    return f"at the highest {size(abs(excess.n_bytes))} {side} what was reported, at {instant(excess.seconds)}"


def costs(record: Record, before: Record | None, most: float) -> Iterator[Judgement]:
    """Yield what a running request costs on each GPU at the highest load with enough readings."""
    for uuid, old in paired(record, before):
        name = record.gpus[uuid].name
        cost = record.gpus[uuid].costs.busiest
        past = None if before is None or old is None else before.gpus[old].costs.busiest
        missing = doubt(record, record.gpus[uuid].coverage, name)
        if cost is None and missing is None:
            missing = f"no load has {READINGS} readings, after {LEAST_REQUESTS:,.0f} requests: run each for longer"
        value = None if cost is None else cost.bytes_per_request
        comparable = None if too_little(record) else value  # full load was hardly reached
        yield Judgement(
            limit=COST,
            of=name,
            outcome=compared(comparable, most, missing),
            unit=Unit.BYTES,
            value=value,
            most=most,
            baseline=None if past is None else past.bytes_per_request,
            found="unknown" if cost is None else _cost(cost),
            allowed=size(most),
            before=None if past is None else _cost(past),
            why=missing or _held(cost),
        )


def _held(cost: Cost | None) -> str:
    return "" if cost is None else f"{size(cost.held_bytes)} held at this load"


def _cost(cost: Cost) -> str:
    return f"{size(cost.bytes_per_request)} at {cost.running:.3g} running"


def preemptions(record: Record, before: Record | None, most: float) -> Judgement:
    """Return how often a request was preempted."""
    value = per_thousand(record)
    missing = doubt(record, record.engine, "the engine")
    if value is None and missing is None:
        missing = "the engine does not say how often it preempted a request"
    past = None if before is None else per_thousand(before)
    return Judgement(
        limit=PREEMPTIONS,
        of="",
        outcome=compared(value, most, missing),
        unit=Unit.COUNT,
        value=value,
        most=most,
        baseline=past,
        found="unknown" if value is None else f"{value:.3g}",
        allowed=f"{most:.3g}",
        before=None if past is None else f"{past:.3g}",
        why=missing or f"{record.preemptions.total:,.0f} in all",
    )


def per_thousand(record: Record) -> float | None:
    """Return the preemptions per thousand requests; None where they are unknown or requests are too few."""
    done, preempted = record.finished.total, record.preemptions.total
    if preempted is None or not done or done < LEAST_REQUESTS:
        return None
    return 1000 * preempted / done


def restarts(record: Record, before: Record | None, most: int) -> Judgement:
    """Return how often the engine began anew."""
    missing = too_little(record) or unread(record, record.engine, "the engine")
    return Judgement(
        limit=RESTARTS,
        of="",
        outcome=compared(record.restarts, most, missing),
        unit=Unit.COUNT,
        value=float(record.restarts),
        most=most,
        baseline=None if before is None else float(before.restarts),
        found=str(record.restarts),
        allowed=str(most),
        before=None if before is None else str(before.restarts),
        why=missing or "",
    )
