"""Which sources could be read, how long it took and when it last worked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from vllm_headroom import catalog
from vllm_headroom.model import ReadingTime, Sample, Snapshot
from vllm_headroom.vocabulary import REASONS, Reason, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthState:
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
