"""The limits on a trace by itself, but for leaks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from vllm_headroom.commands.check.judgement import COST, DISCREPANCY, PREEMPTIONS, RESTARTS, Judgement, Unit, compared
from vllm_headroom.commands.check.record import LEAST_REQUESTS, Record, doubt, paired, too_little, unread
from vllm_headroom.commands.check.series import Cost, Excess
from vllm_headroom.commands.conclusion import Conclusion
from vllm_headroom.derive.leak.baseline import READINGS
from vllm_headroom.units import instant, size

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
