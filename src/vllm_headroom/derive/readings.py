"""The readings as samples, under stable names."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Final, TypeVar

from vllm_headroom import catalog
from vllm_headroom.model import INPUTS, EnginePage, EngineReading, Gpu, Metric, Sample, Snapshot

RESTART_SHARE: Final = 0.5

N = TypeVar("N", int, float)


def list_engines(page: EnginePage | None) -> tuple[EngineReading, ...]:
    """Return the engines of the page; none where it could not be read."""
    return () if page is None else page.engines


def list_named(page: EnginePage | None) -> tuple[EngineReading, ...]:
    """Return the engines with a model name: before its first request, vLLM V0 exports its settings without one."""
    return tuple(engine for engine in list_engines(page) if engine.model_name)


def sum_known(values: Iterable[N | None]) -> N | None:
    """Return the sum; None where one value is unknown, or without values."""
    known: list[N] = []
    for value in values:
        if value is None:
            return None
        known.append(value)
    return sum(known) if known else None


def count_running(page: EnginePage | None) -> float | None:
    """Return the running requests of all engines; None where one is unknown, or without engines.

    A sleeping engine runs none: its gauges are frozen.
    """
    return sum_known(
        0.0 if each.running and each.awake is False else each.running for each in list_named(page)
    )


def count_finished(page: EnginePage | None) -> float | None:
    """Return the finished requests of all engines; None where one is unknown."""
    return sum_known(engine.finished_total for engine in list_named(page))


def identify_run(page: EnginePage | None) -> str | None:
    """Return the start times of the page's servers, which identify this run; None where the page has none."""
    started = {
        engine.started_at_seconds
        for engine in list_engines(page)
        if engine.started_at_seconds is not None
    }
    return ",".join(sorted(f"{seconds:.3f}" for seconds in started)) or None


def is_new_run(
    run_id: str | None, new_run_id: str | None, finished: float | None, new_finished: float | None
) -> bool:
    """Return whether the second pair belongs to another run than the first; unknown values prove nothing.

    A counter that falls within one run was reset. If several servers answer in turn, the latest start identifies the
    run; an earlier start is a restart, after the clock was set, only if the count has more than halved: servers that
    share the load have similar counts.
    """
    fell = (
        finished is not None
        and new_finished is not None
        and new_finished < RESTART_SHARE * finished
    )
    if run_id is None or new_run_id is None:
        return fell
    if run_id == new_run_id:  # nearly always: their parts are not looked at then
        return False
    before, now = _find_latest_start(run_id), _find_latest_start(new_run_id)
    return now > before or (now < before and fell) or run_id.count(",") != new_run_id.count(",")


def _find_latest_start(run_id: str) -> tuple[int, str]:
    """Return a sortable key of the latest start; a process has its pid before its start."""
    starts = [name.rpartition(":")[2] for name in run_id.split(",")]
    return max((len(start), start) for start in starts)


def is_page_awake(page: EnginePage | None) -> bool | None:
    """Return False while an engine of the page sleeps; None where none reports it."""
    said = [engine.awake for engine in list_engines(page) if engine.awake is not None]
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
    (catalog.UNIFIED_FREE_BLOCKS, "machine_free_blocks_bytes"),
)
_INSIDE_FACTS: Final[tuple[tuple[Metric, str], ...]] = (
    (catalog.ALLOCATOR_ALLOCATED, "allocated_bytes"),
    (catalog.ALLOCATOR_RESERVED, "reserved_bytes"),
)
_ENGINE_FACTS: Final = tuple(
    (catalog.BY_NAME[each.metric], field) for field, each in INPUTS.items() if each.metric
)


MOST_REMEMBERED: Final = 256
"""Entries kept while some do not show: as many as a page may have engines, and more than a machine has GPU parts.
Names may be new each time."""

K = TypeVar("K")
V = TypeVar("V")


def limit_remembered(known: Mapping[K, V], present: Collection[K]) -> dict[K, V]:
    """Drop what does not show now if more than MOST_REMEMBERED entries are known."""
    return {
        name: each
        for name, each in known.items()
        if name in present or len(known) <= MOST_REMEMBERED
    }


def label_gpu(gpu: Gpu) -> tuple[str, str]:
    """Return the values of the labels `gpu` and `uuid`."""
    return str(gpu.reading.index), gpu.reading.uuid


def label_engine(engine: EngineReading) -> tuple[str, str]:
    """Return the values of the labels `model_name` and `engine`."""
    return engine.model_name, engine.engine


def make_states(metric: Metric, labels: tuple[str, ...], found: StrEnum) -> tuple[Sample, ...]:
    """Return a sample per state of a series: 1 for the current one, 0 for the others."""
    members = type(found).__members__.values()  # three times as fast as the class itself
    return tuple(
        [Sample(metric, (*labels, str(each)), 1.0 if each is found else 0.0) for each in members]
    )


def derive_readings(snapshot: Snapshot) -> tuple[Sample, ...]:
    """Return the readings of GPUs, engines and offered inputs as samples."""
    samples = [sample for gpu in snapshot.devices for sample in _derive_gpu(gpu)]
    page = snapshot.page
    if page is not None:
        samples += [
            Sample(catalog.INPUT_AVAILABLE, (name,), float(found)) for name, found in page.inputs
        ]
        for labels, engine in ((label_engine(engine), engine) for engine in list_named(page)):
            samples += [Sample(catalog.ENGINE_INFO, (*labels, page.profile), 1.0)]
            samples += make_facts(_ENGINE_FACTS, labels, engine)
    return tuple(samples)


def _derive_gpu(gpu: Gpu) -> Iterator[Sample]:
    labels, reading = label_gpu(gpu), gpu.reading
    unified = (
        " (unified memory)" if reading.memory is not None and reading.memory.is_unified else ""
    )
    yield Sample(catalog.GPU_INFO, (*labels, reading.name + unified, gpu.attribution or ""), 1.0)
    yield Sample(catalog.GPU_UP, labels, float(reading.failure is None))
    if reading.memory is not None:
        yield from make_facts(_MEMORY_FACTS, labels, reading.memory)
        known = {"engine": gpu.engine_bytes, "other": gpu.other_bytes}
        for holder, held_bytes in known.items():
            if held_bytes is not None:
                yield Sample(catalog.GPU_MEMORY_HELD, (*labels, holder), float(held_bytes))
        rest = reading.memory.used_bytes - sum(held_bytes or 0 for held_bytes in known.values())
        yield Sample(catalog.GPU_MEMORY_HELD, (*labels, "unattributed"), float(rest))
    left = [leftover.used_bytes for leftover in gpu.leftovers if leftover.used_bytes is not None]
    if left:
        yield Sample(catalog.GPU_MEMORY_LEFT_BEHIND, labels, float(sum(left)))
    yield from make_facts(_GPU_FACTS, labels, reading)
    yield from make_facts(_INSIDE_FACTS, labels, gpu.inside)
    for part, part_bytes in () if gpu.inside is None else gpu.inside.parts:
        yield Sample(catalog.ENGINE_MEMORY, (*labels, str(part)), float(part_bytes))
    for xid, count in reading.xid_errors:
        yield Sample(catalog.GPU_XID_ERRORS, (*labels, str(xid)), float(count))


def derive_engine_state(snapshot: Snapshot) -> tuple[Sample, ...]:
    """Return the server's state, the start and number of its runs, and its progress."""
    known = snapshot.engine_status
    if known is None:
        return ()
    samples = [*make_states(catalog.ENGINE_STATE, (), known.state)]
    if known.began_seconds is not None:
        samples.append(Sample(catalog.ENGINE_START, (), known.began_seconds))
    samples.append(Sample(catalog.ENGINE_RESTARTS, (), float(known.restarts)))
    samples += [
        Sample(catalog.ENGINE_EXITS, (str(reason),), float(count)) for reason, count in known.exits
    ]
    if known.progress_age_seconds is not None:
        samples.append(Sample(catalog.ENGINE_PROGRESS_AGE, (), known.progress_age_seconds))
    return (
        *samples,
        *(Sample(catalog.ENGINE_KV_STRANDED, labels, ratio) for labels, ratio in known.stranded),
    )


def make_facts(
    table: tuple[tuple[Metric, str], ...], labels: tuple[str, ...], reading: object
) -> list[Sample]:
    """Return a reading's samples by a table of metrics and attributes; none without a reading."""
    values = [
        (metric, getattr(reading, attribute))
        for metric, attribute in (table if reading is not None else ())
    ]
    return [Sample(metric, labels, float(value)) for metric, value in values if value is not None]
