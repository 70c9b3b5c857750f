"""Counts of errors in torch's allocator, summed over all processes of the engine."""

from typing import Final

from msgspec import Struct, field

from vllm_headroom import catalog
from vllm_headroom.derive.series import label_gpu, limit_remembered
from vllm_headroom.model import (
    AllocatorReading,
    Metric,
    ProbedProcess,
    ProbeReadings,
    Sample,
    Snapshot,
)

MOST_COUNTS: Final = 512
"""The maximum number of per-process counters that are kept. The maximum is four times the number of
probe files read at once.
"""

CounterKey = tuple[str, str, int, float]
"""The key of a process's counter: GPU UUID, metric name, pid and start time."""

SumKey = tuple[str, str]
"""The key of a sum: GPU UUID and metric name."""

_COUNTERS: Final[tuple[Metric, ...]] = (catalog.ALLOCATOR_RETRIES, catalog.ALLOCATOR_OOMS)


class Counts(Struct, frozen=True, kw_only=True):
    """The counts of all processes so far."""

    last: dict[CounterKey, int] = field(default_factory=dict)
    """The newest count of each process, ordered from the least to the most recently read."""

    sums: dict[SumKey, int] = field(default_factory=dict)
    """The sums over all processes, including exited ones."""


def derive_counters(state: Counts, snapshot: Snapshot) -> tuple[Counts, tuple[Sample, ...]]:
    """Return the allocator's counters for each of the engine's GPUs, summed over all processes.

    For an exited process, the counts in its last file are used. There are no samples if the probe's
    files cannot be read, or if no GPU is known to be the engine's. A counter that no process has
    reported has no sample.
    """
    probe = snapshot.probe
    gpus = snapshot.owned_gpus
    if not isinstance(probe, ProbeReadings) or not gpus:
        return state, ()
    uuids = {gpu.reading.uuid.casefold() for gpu in gpus}
    present_keys = {(uuid, metric.name) for uuid in uuids for metric in _COUNTERS}
    counts = dict(state.last)
    sums = limit_remembered(state.sums, present_keys)
    # If there are too many counters, only the last ones added are kept. Running processes are
    # therefore added last.
    for process in (*probe.others, *probe.silent, *probe.present):
        for device in process.devices:
            if device.uuid.casefold() in uuids:
                _count_device(counts, sums, process, device)

    samples = []
    for gpu in gpus:
        for metric in _COUNTERS:
            key = (gpu.reading.uuid.casefold(), metric.name)
            if key in sums:
                samples.append(Sample(metric, label_gpu(gpu), float(sums[key])))
    # The number of counters is bounded, because a crash loop keeps adding processes.
    newest_counts = dict(tuple(counts.items())[-MOST_COUNTS:])
    return Counts(last=newest_counts, sums=sums), tuple(samples)


def _count_device(
    counts: dict[CounterKey, int],
    sums: dict[SumKey, int],
    process: ProbedProcess,
    device: AllocatorReading,
) -> None:
    """Add a process's new errors on a device to `counts` and `sums`, in place."""
    uuid = device.uuid.casefold()
    _add_count(counts, sums, process, (uuid, catalog.ALLOCATOR_RETRIES.name), device.retries)
    ooms = device.ooms
    oom = process.oom
    # The probe may have recorded an error after it read the allocator's figures.
    if oom is not None and oom.uuid is not None and oom.uuid.casefold() == uuid:
        ooms = max(ooms or 0, oom.seen or 1)
    _add_count(counts, sums, process, (uuid, catalog.ALLOCATOR_OOMS.name), ooms)


def _add_count(
    counts: dict[CounterKey, int],
    sums: dict[SumKey, int],
    process: ProbedProcess,
    sum_key: SumKey,
    count: int | None,
) -> None:
    """Add the increase in a process's counter to the sum.

    A counter that fell adds nothing.
    """
    if count is None:
        return
    key = (*sum_key, process.pid, process.started_at_seconds)
    # The counter moves to the end of the dict. The oldest counters are dropped first.
    earlier_count = counts.pop(key, 0)
    counts[key] = max(earlier_count, count)
    sums[sum_key] = sums.get(sum_key, 0) + counts[key] - earlier_count
