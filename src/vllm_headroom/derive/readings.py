"""The readings as samples, under stable names."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Final, TypeVar

from vllm_headroom import catalog
from vllm_headroom.model import INPUTS, EnginePage, EngineReading, Gpu, Metric, Sample, Snapshot

RESTART_SHARE: Final = 0.5
"""A count of finished requests below this share of the previous one is that of another run."""

N = TypeVar("N", int, float)


def list_engines(page: EnginePage | None) -> tuple[EngineReading, ...]:
    """Return the engines of the page; none where it could not be read."""
    return () if page is None else page.engines


def list_named(page: EnginePage | None) -> tuple[EngineReading, ...]:
    """Return the engines with a model name.

    Before its first request, vLLM V0 exports its settings without one.
    """
    return tuple(engine for engine in list_engines(page) if engine.model_name)


def sum_known(values: Iterable[N | None]) -> N | None:
    """Return the sum; None where one value is unknown, or without values."""
    numbers: list[N] = []
    for value in values:
        if value is None:
            return None
        numbers.append(value)
    return sum(numbers) if numbers else None


def count_running(page: EnginePage | None) -> float | None:
    """Return the running requests of all engines; None where one is unknown, or without engines.

    A sleeping engine runs none: its gauges are frozen.
    """
    counts: list[float | None] = []
    for engine in list_named(page):
        is_asleep = engine.awake is False
        counts.append(0.0 if is_asleep and engine.running else engine.running)
    return sum_known(counts)


def count_finished(page: EnginePage | None) -> float | None:
    """Return the finished requests of all engines; None where one is unknown."""
    return sum_known(engine.finished_total for engine in list_named(page))


def identify_run(page: EnginePage | None) -> str | None:
    """Return the start times of the page's servers, which identify this run.

    None where the page has none.
    """
    starts = {
        engine.started_at_seconds
        for engine in list_engines(page)
        if engine.started_at_seconds is not None
    }
    return ",".join(sorted(f"{seconds:.3f}" for seconds in starts)) or None


def is_new_run(
    run_id: str | None, new_run_id: str | None, finished: float | None, new_finished: float | None
) -> bool:
    """Return whether the second pair belongs to another run than the first.

    Unknown values prove nothing. A counter that falls within one run was reset. If several servers
    answer in turn, the latest start identifies the run; an earlier start is a restart, after the
    clock was set, only if the count has more than halved: servers that share the load have similar
    counts.
    """
    has_restarted_count = False
    if finished is not None and new_finished is not None:
        has_restarted_count = new_finished < RESTART_SHARE * finished
    if run_id is None or new_run_id is None:
        return has_restarted_count
    if run_id == new_run_id:  # fast path: identifiers usually match
        return False
    if run_id.count(",") != new_run_id.count(","):
        return True
    latest_start = _find_latest_start(run_id)
    new_latest_start = _find_latest_start(new_run_id)
    if new_latest_start > latest_start:
        return True
    return new_latest_start < latest_start and has_restarted_count


def _find_latest_start(run_id: str) -> tuple[int, str]:
    """Return a sortable key of the latest start; a process has its pid before its start."""
    starts = [name.rpartition(":")[2] for name in run_id.split(",")]
    return max((len(start), start) for start in starts)


def is_page_awake(page: EnginePage | None) -> bool | None:
    """Return False while an engine of the page sleeps; None where none reports it."""
    reports = [engine.awake for engine in list_engines(page) if engine.awake is not None]
    return all(reports) if reports else None


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
    (catalog.BY_NAME[source.metric], field) for field, source in INPUTS.items() if source.metric
)


MOST_REMEMBERED: Final = 256
"""Entries kept while some do not show: as many as a page may have engines, and more than a machine
has GPU parts. Names may be new each time."""

K = TypeVar("K")
V = TypeVar("V")


def limit_remembered(entries: Mapping[K, V], present: Collection[K]) -> dict[K, V]:
    """Drop what does not show now if there are more than MOST_REMEMBERED entries."""
    if len(entries) <= MOST_REMEMBERED:
        return dict(entries)
    return {name: entry for name, entry in entries.items() if name in present}


def label_gpu(gpu: Gpu) -> tuple[str, str]:
    """Return the values of the labels `gpu` and `uuid`."""
    return str(gpu.reading.index), gpu.reading.uuid


def label_engine(engine: EngineReading) -> tuple[str, str]:
    """Return the values of the labels `model_name` and `engine`."""
    return engine.model_name, engine.engine


def make_states(metric: Metric, labels: tuple[str, ...], current: StrEnum) -> tuple[Sample, ...]:
    """Return a sample per state of a series: 1 for the current one, 0 for the others."""
    members = type(current).__members__.values()  # three times as fast as the class itself
    return tuple(
        [
            Sample(metric, (*labels, str(member)), 1.0 if member is current else 0.0)
            for member in members
        ]
    )


def derive_readings(snapshot: Snapshot) -> tuple[Sample, ...]:
    """Return the readings of GPUs, engines and offered inputs as samples."""
    samples: list[Sample] = []
    for gpu in snapshot.devices:
        samples += _derive_gpu(gpu)
    page = snapshot.page
    if page is None:
        return tuple(samples)
    for name, is_present in page.inputs:
        samples.append(Sample(catalog.INPUT_AVAILABLE, (name,), float(is_present)))
    for engine in list_named(page):
        labels = label_engine(engine)
        samples.append(Sample(catalog.ENGINE_INFO, (*labels, page.profile), 1.0))
        samples += make_facts(_ENGINE_FACTS, labels, engine)
    return tuple(samples)


def _derive_gpu(gpu: Gpu) -> Iterator[Sample]:
    """Yield the samples of one GPU, whoever uses it."""
    labels = label_gpu(gpu)
    reading = gpu.reading
    name = reading.name
    if reading.memory is not None and reading.memory.is_unified:
        name += " (unified memory)"
    yield Sample(catalog.GPU_INFO, (*labels, name, gpu.attribution or ""), 1.0)
    yield Sample(catalog.GPU_UP, labels, float(reading.failure is None))
    if reading.memory is not None:
        yield from make_facts(_MEMORY_FACTS, labels, reading.memory)
        yield from _derive_holders(gpu, reading.memory.used_bytes)
    leftover_sizes = [
        leftover.used_bytes for leftover in gpu.leftovers if leftover.used_bytes is not None
    ]
    if leftover_sizes:
        yield Sample(catalog.GPU_MEMORY_LEFT_BEHIND, labels, float(sum(leftover_sizes)))
    yield from make_facts(_GPU_FACTS, labels, reading)
    yield from make_facts(_INSIDE_FACTS, labels, gpu.inside)
    if gpu.inside is not None:
        for part, part_bytes in gpu.inside.parts:
            yield Sample(catalog.ENGINE_MEMORY, (*labels, str(part)), float(part_bytes))
    for xid, count in reading.xid_errors:
        yield Sample(catalog.GPU_XID_ERRORS, (*labels, str(xid)), float(count))


def _derive_holders(gpu: Gpu, used_bytes: int) -> Iterator[Sample]:
    """Yield who holds the memory in use; the holders sum to it."""
    labels = label_gpu(gpu)
    unattributed_bytes = used_bytes
    for holder, held_bytes in (("engine", gpu.engine_bytes), ("other", gpu.other_bytes)):
        if held_bytes is not None:
            unattributed_bytes -= held_bytes
            yield Sample(catalog.GPU_MEMORY_HELD, (*labels, holder), float(held_bytes))
    yield Sample(catalog.GPU_MEMORY_HELD, (*labels, "unattributed"), float(unattributed_bytes))


def derive_engine_state(snapshot: Snapshot) -> tuple[Sample, ...]:
    """Return the server's state, the start and number of its runs, and its progress."""
    status = snapshot.engine_status
    if status is None:
        return ()
    samples = [*make_states(catalog.ENGINE_STATE, (), status.state)]
    if status.began_seconds is not None:
        samples.append(Sample(catalog.ENGINE_START, (), status.began_seconds))
    samples.append(Sample(catalog.ENGINE_RESTARTS, (), float(status.restarts)))
    for reason, count in status.exits:
        samples.append(Sample(catalog.ENGINE_EXITS, (str(reason),), float(count)))
    if status.progress_age_seconds is not None:
        samples.append(Sample(catalog.ENGINE_PROGRESS_AGE, (), status.progress_age_seconds))
    for labels, ratio in status.stranded:
        samples.append(Sample(catalog.ENGINE_KV_STRANDED, labels, ratio))
    return tuple(samples)


def make_facts(
    table: tuple[tuple[Metric, str], ...], labels: tuple[str, ...], reading: object
) -> list[Sample]:
    """Return a reading's samples by a table of metrics and attributes; none without a reading."""
    if reading is None:
        return []
    samples = []
    for metric, attribute in table:
        value = getattr(reading, attribute)
        if value is not None:
            samples.append(Sample(metric, labels, float(value)))
    return samples
