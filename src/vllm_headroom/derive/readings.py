"""What the readings say themselves, under names that do not move."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Final, TypeVar

from vllm_headroom import catalog
from vllm_headroom.model import INPUTS, EnginePage, EngineReading, Gpu, Metric, Sample, Snapshot

RESTART_SHARE: Final = 0.5


def engines(page: EnginePage | None) -> tuple[EngineReading, ...]:
    """Return what each engine says, nothing where the page could not be read."""
    return () if page is None else page.engines


def named(page: EnginePage | None) -> tuple[EngineReading, ...]:
    """Return the engines with a model's name: before its first request, vLLM V0 tells its settings and no name."""
    return tuple(engine for engine in engines(page) if engine.model_name)


def together(values: Iterable[float | None]) -> float | None:
    """Return the sum; None where one is unknown, for the rest is not the whole, or there is none."""
    known: list[float] = []
    for value in values:
        if value is None:
            return None
        known.append(value)
    return sum(known) if known else None


def running_requests(page: EnginePage | None) -> float | None:
    """Return the requests all engines of the page run; None where one does not say, or there is none.

    One that sleeps runs none: what its page shows then was frozen in it.
    """
    return together(0.0 if each.running and each.awake is False else each.running for each in named(page))


def finished(page: EnginePage | None) -> float | None:
    """Return the requests all engines of the page finished; None where one does not say."""
    return together(engine.finished_total for engine in named(page))


def life(page: EnginePage | None) -> str | None:
    """Return what names this life of the server: when it started, where the page says so."""
    started = {engine.started_at_seconds for engine in engines(page) if engine.started_at_seconds is not None}
    return ",".join(sorted(f"{seconds:.3f}" for seconds in started)) or None


def begun_anew(life: str | None, new_life: str | None, finished: float | None, new_finished: float | None) -> bool:
    """Return whether the second pair belongs to another life than the first; what is unknown tells nothing.

    A counter that falls within one life was reset. Of several servers that answer in turn the latest start is the life;
    an earlier one is a restart only where the count is less than half, be it that the clock was set: servers that share
    the load count about alike.
    """
    fell = finished is not None and new_finished is not None and new_finished < RESTART_SHARE * finished
    if life is None or new_life is None:
        return fell
    if life == new_life:  # nearly always: their parts are not looked at then
        return False
    before, now = _latest(life), _latest(new_life)
    return now > before or (now < before and fell) or life.count(",") != new_life.count(",")


def _latest(life: str) -> tuple[int, str]:
    """Return what orders lives by their latest start; a process has its pid before it."""
    starts = [name.rpartition(":")[2] for name in life.split(",")]
    return max((len(start), start) for start in starts)


def awake(page: EnginePage | None) -> bool | None:
    """Return False while an engine of the page sleeps; None where none says."""
    said = [engine.awake for engine in engines(page) if engine.awake is not None]
    return all(said) if said else None


_GPU_FACTS: Final[tuple[tuple[Metric, str], ...]] = (
    (catalog.GPU_MEMORY_USED_PEAK, "used_peak_bytes"),
    (catalog.GPU_UTILIZATION, "utilization_ratio"),
    (catalog.GPU_TEMPERATURE, "temperature_celsius"),
    (catalog.GPU_POWER, "power_watts"),
)
_MEMORY_FACTS: Final[tuple[tuple[Metric, str], ...]] = (
    (catalog.GPU_MEMORY_TOTAL, "total_bytes"),
    (catalog.GPU_MEMORY_USED, "used_bytes"),
    (catalog.GPU_MEMORY_FREE, "free_bytes"),
    (catalog.GPU_MEMORY_RESERVED, "reserved_bytes"),
)
_INSIDE_FACTS: Final[tuple[tuple[Metric, str], ...]] = (
    (catalog.ALLOCATOR_ALLOCATED, "allocated_bytes"),
    (catalog.ALLOCATOR_RESERVED, "reserved_bytes"),
)
_ENGINE_FACTS: Final = tuple((catalog.BY_NAME[each.metric], field) for field, each in INPUTS.items() if each.metric)


MOST_REMEMBERED: Final = 256
"""Engines, or GPUs, kept while some of them do not show; as many engines as a page may have, and more than a machine
has parts of GPUs. Names may be new each time."""

K = TypeVar("K")
V = TypeVar("V")


def remembered(known: Mapping[K, V], present: Collection[K]) -> dict[K, V]:
    """Return what is known by name, less what does not show now where there is much of it."""
    return {name: each for name, each in known.items() if name in present or len(known) <= MOST_REMEMBERED}


def gpu_labels(gpu: Gpu) -> tuple[str, str]:
    """Return the values of the labels `gpu` and `uuid`."""
    return str(gpu.reading.index), gpu.reading.uuid


def engine_labels(engine: EngineReading) -> tuple[str, str]:
    """Return the values of the labels `model_name` and `engine`."""
    return engine.model_name, engine.engine


def states(metric: Metric, labels: tuple[str, ...], found: StrEnum) -> tuple[Sample, ...]:
    """Return a sample of each state that a series can be in: 1 of the one it is in, 0 of the others."""
    members = type(found).__members__.values()  # three times as fast as the class itself
    return tuple([Sample(metric, (*labels, str(each)), 1.0 if each is found else 0.0) for each in members])


def readings(snapshot: Snapshot) -> tuple[Sample, ...]:
    """Return the samples that are readings: of GPUs, of engines, of what the page offers."""
    samples = [sample for gpu in snapshot.devices for sample in _of_gpu(gpu)]
    page = snapshot.page
    if page is not None:
        samples += [Sample(catalog.INPUT_AVAILABLE, (name,), float(found)) for name, found in page.inputs]
        samples += [sample for engine in named(page) for sample in _of_engine(engine, page.profile)]
    return tuple(samples)


def _of_gpu(gpu: Gpu) -> Iterator[Sample]:
    labels, reading = gpu_labels(gpu), gpu.reading
    unified = " (unified memory)" if reading.memory is not None and reading.memory.unified else ""
    yield Sample(catalog.GPU_INFO, (*labels, reading.name + unified, gpu.attribution or ""), 1.0)
    yield Sample(catalog.GPU_UP, labels, float(reading.failure is None))
    if reading.memory is not None:
        yield from facts(_MEMORY_FACTS, labels, reading.memory)
        yield from _held(gpu, labels, reading.memory.used_bytes)
    left = [leftover.used_bytes for leftover in gpu.leftovers if leftover.used_bytes is not None]
    if left:
        yield Sample(catalog.GPU_MEMORY_LEFT_BEHIND, labels, float(sum(left)))
    yield from facts(_GPU_FACTS, labels, reading)
    yield from facts(_INSIDE_FACTS, labels, gpu.inside)
    for part, part_bytes in () if gpu.inside is None else gpu.inside.parts:
        yield Sample(catalog.ENGINE_MEMORY, (*labels, str(part)), float(part_bytes))
    for xid, count in reading.xid_errors:
        yield Sample(catalog.GPU_XID_ERRORS, (*labels, str(xid)), float(count))


def _held(gpu: Gpu, labels: tuple[str, str], used_bytes: int) -> Iterator[Sample]:
    known = {"engine": gpu.engine_bytes, "other": gpu.other_bytes}
    for holder, held_bytes in known.items():
        if held_bytes is not None:
            yield Sample(catalog.GPU_MEMORY_HELD, (*labels, holder), float(held_bytes))
    rest = used_bytes - sum(held_bytes or 0 for held_bytes in known.values())
    yield Sample(catalog.GPU_MEMORY_HELD, (*labels, "unattributed"), float(rest))


def _of_engine(engine: EngineReading, profile: str) -> Iterator[Sample]:
    labels = engine_labels(engine)
    yield Sample(catalog.ENGINE_INFO, (*labels, profile), 1.0)
    yield from facts(_ENGINE_FACTS, labels, engine)


def engine_state(snapshot: Snapshot) -> tuple[Sample, ...]:
    """Return the state the server is in, when this life began and how many there were, and whether it moves."""
    known = snapshot.life
    if known is None:
        return ()
    samples = [*states(catalog.ENGINE_STATE, (), known.state)]
    if known.began_seconds is not None:
        samples.append(Sample(catalog.ENGINE_START, (), known.began_seconds))
    samples.append(Sample(catalog.ENGINE_RESTARTS, (), float(known.restarts)))
    samples += [Sample(catalog.ENGINE_EXITS, (str(reason),), float(count)) for reason, count in known.exits]
    if known.progress_age_seconds is not None:
        samples.append(Sample(catalog.ENGINE_PROGRESS_AGE, (), known.progress_age_seconds))
    return (*samples, *(Sample(catalog.ENGINE_KV_STRANDED, labels, ratio) for labels, ratio in known.stranded))


def facts(table: tuple[tuple[Metric, str], ...], labels: tuple[str, ...], reading: object) -> list[Sample]:
    """Return what a reading says, by a table of metrics and attributes; nothing where there is none."""
    values = [(metric, getattr(reading, attribute)) for metric, attribute in (table if reading is not None else ())]
    return [Sample(metric, labels, float(value)) for metric, value in values if value is not None]
