"""Which sources could be read, how long it took and when it last worked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.model import Gpu, ReadingTime, Sample, Snapshot
from vllm_headroom.vocabulary import REASONS, Attribution, Reason, Source


class HealthState(Struct, frozen=True, kw_only=True):
    """Failures counted since the daemon started, by their labels; each source's last success in epoch seconds."""

    failures: dict[tuple[str, str], int]
    last_success_seconds: dict[Source, float]


def _none_of(source: Source) -> dict[tuple[str, str], int]:
    return {(str(source), str(reason)): 0 for reason in REASONS[source]}


INITIAL: Final = HealthState(
    failures={labels: 0 for source in REASONS if source is not Source.PROBE for labels in _none_of(source)},
    last_success_seconds={},
)
"""The probe's failures are counted from where its folder is first read: not where none is configured."""


def health(state: HealthState, snapshot: Snapshot) -> tuple[HealthState, tuple[Sample, ...]]:
    """Return the health series of every source that was read in this snapshot."""
    failed = {failure.source: failure.reason for failure in snapshot.failures}
    failures = {**({} if snapshot.probe is None else _none_of(Source.PROBE)), **state.failures}
    for source, reason in failed.items():
        failures[str(source), str(reason)] = failures.get((source, reason), 0) + 1
    succeeded = {
        reading.source: snapshot.time_seconds for reading in snapshot.reading_times if reading.source not in failed
    }
    following = HealthState(failures=failures, last_success_seconds=state.last_success_seconds | succeeded)
    return following, tuple(_samples(following, snapshot.reading_times, failed))


def _samples(
    state: HealthState, reading_times: tuple[ReadingTime, ...], failed: dict[Source, Reason]
) -> Iterator[Sample]:
    for reading in reading_times:
        source_labels = (str(reading.source),)
        yield Sample(catalog.SOURCE_UP, source_labels, float(reading.source not in failed))
        yield Sample(catalog.SOURCE_READ_SECONDS, source_labels, reading.seconds)
    for labels, count in state.failures.items():
        yield Sample(catalog.SOURCE_FAILURES, labels, float(count))
    for source, seconds in state.last_success_seconds.items():
        yield Sample(catalog.SOURCE_LAST_SUCCESS, (str(source),), seconds)
    yield from _skew({reading.source: reading for reading in reading_times if reading.source not in failed})


def _skew(times: dict[Source, ReadingTime]) -> Iterator[Sample]:
    if Source.ENGINE in times and Source.NVML in times:
        difference = times[Source.ENGINE].ended_monotonic_seconds - times[Source.NVML].ended_monotonic_seconds
        yield Sample(catalog.SAMPLE_SKEW, (), abs(difference))


def with_lost(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with whose its GPUs are where some that this life of the engine had do not show any more.

    A GPU that does not open tells no UUID, and NVML lists no process on it: it is the engine's where no more of them do
    not open than are missing. Another is not, though it be the only one left.
    """
    known = {} if snapshot.life is None else dict(snapshot.life.first_rooms)
    missing = sorted(known.keys() - {gpu.reading.uuid for gpu in snapshot.devices})
    unopened = sum(not gpu.reading.uuid for gpu in snapshot.devices)
    if not missing or not snapshot.devices:
        return snapshot
    name = missing[0] if len(missing) == 1 else ""

    def whose(gpu: Gpu) -> Gpu:
        if not gpu.reading.uuid and unopened <= len(missing):
            reading = replace(gpu.reading, uuid=name)
            return replace(gpu, reading=reading, attribution=gpu.attribution or Attribution.PROCESS)
        if gpu.attribution is Attribution.SINGLE and gpu.reading.uuid not in known:
            return replace(gpu, attribution=None, held_bytes=None)
        return gpu

    return replace(snapshot, gpus=tuple(map(whose, snapshot.devices)))
