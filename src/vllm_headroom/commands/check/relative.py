"""The limit on growth over a baseline: the same figures of two traces, where they can be compared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from vllm_headroom.commands.check.judgement import (
    CAPACITY,
    GROWTH,
    HOST_GROWTH,
    PART_GROWTH,
    Judgement,
    Unit,
    compared,
    written,
)
from vllm_headroom.commands.check.record import Record, doubt, paired
from vllm_headroom.commands.check.series import Cost, MemorySeries
from vllm_headroom.units import size
from vllm_headroom.vocabulary import MemoryPart

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
