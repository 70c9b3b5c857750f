"""How often has torch's allocator run out of memory on each GPU?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec import Struct, field

from vllm_headroom import catalog
from vllm_headroom.derive.readings import gpu_labels, remembered
from vllm_headroom.model import AllocatorReading, Gpu, Metric, ProbedProcess, ProbeReadings, Sample, Snapshot

MOST_COUNTS: Final = 512
"""Counts of processes that are remembered: four times the files that are read at once."""

Key = tuple[str, str, int, float]
"""A count by the UUID of its GPU, its metric and its process."""

_METRICS: Final[tuple[Metric, ...]] = (catalog.ALLOCATOR_RETRIES, catalog.ALLOCATOR_OOMS)


class Counts(Struct, frozen=True, kw_only=True):
    """What each process last counted, oldest first, and the sum over all processes there ever were, by UUID and metric.

    A process counts from 0 at its start, the sums go on.
    """

    last: dict[Key, int] = field(default_factory=dict)
    sums: dict[tuple[str, str], int] = field(default_factory=dict)


def counters(state: Counts, snapshot: Snapshot) -> tuple[Counts, tuple[Sample, ...]]:
    """Return the counters of each GPU of the engine; what a process counted before it died is in its last file."""
    probe, gpus = snapshot.probe, snapshot.owned
    if not isinstance(probe, ProbeReadings) or not gpus:
        return state, ()
    uuids = {gpu.reading.uuid.casefold() for gpu in gpus}
    last, present = dict(state.last), {(uuid, metric.name) for uuid in uuids for metric in _METRICS}
    sums = remembered(state.sums, present)
    for process in (*probe.others, *probe.silent, *probe.present):
        for device in process.devices:
            if device.uuid.casefold() in uuids:
                _count(last, sums, process, device)
    state = Counts(last=dict(tuple(last.items())[-MOST_COUNTS:]), sums=sums)
    return state, tuple(_samples(state, gpus))


def _count(
    last: dict[Key, int], sums: dict[tuple[str, str], int], process: ProbedProcess, device: AllocatorReading
) -> None:
    uuid = device.uuid.casefold()
    for metric, count in zip(_METRICS, (device.retries, _ooms(process, device)), strict=True):
        if count is not None:
            key = (uuid, metric.name, process.pid, process.started_at_seconds)
            before = last.pop(key, 0)
            last[key] = max(before, count)
            sums[uuid, metric.name] = sums.get((uuid, metric.name), 0) + last[key] - before


def _ooms(process: ProbedProcess, device: AllocatorReading) -> int | None:
    """Return the errors on a device; that the observer saw one is enough where the allocator's own count is older."""
    oom = process.oom
    if oom is None or oom.uuid is None or oom.uuid.casefold() != device.uuid.casefold():
        return device.ooms
    return max(device.ooms or 0, oom.seen or 1)


def _samples(state: Counts, gpus: tuple[Gpu, ...]) -> Iterator[Sample]:
    for gpu in gpus:
        for metric in _METRICS:
            total = state.sums.get((gpu.reading.uuid.casefold(), metric.name))
            if total is not None:
                yield Sample(metric, gpu_labels(gpu), float(total))
