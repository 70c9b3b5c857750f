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
    """Failures counted since the daemon started, and the last success of each source in seconds since the epoch."""

    failures: dict[tuple[Source, Reason], int]
    last_success_seconds: dict[Source, float]


INITIAL: Final = HealthState(
    failures={
        (source, reason): 0 for source, reasons in REASONS.items() if source is not Source.PROBE for reason in reasons
    },
    last_success_seconds={},
)
"""The probe's failures are counted from where its folder is first read: not where none is configured."""


def health(state: HealthState, snapshot: Snapshot) -> tuple[HealthState, tuple[Sample, ...]]:
    """Return the health series of every source that was read in this snapshot."""
    failed = {failure.source: failure.reason for failure in snapshot.failures}
    failures = {**_of_probe(snapshot), **state.failures}
    for key in failed.items():
        failures[key] = failures.get(key, 0) + 1
    succeeded = {
        reading.source: snapshot.time_seconds for reading in snapshot.reading_times if reading.source not in failed
    }
    following = HealthState(failures=failures, last_success_seconds=state.last_success_seconds | succeeded)
    return following, tuple(_samples(following, snapshot.reading_times, failed))


def _of_probe(snapshot: Snapshot) -> dict[tuple[Source, Reason], int]:
    return {} if snapshot.probe is None else {(Source.PROBE, reason): 0 for reason in REASONS[Source.PROBE]}


def _samples(
    state: HealthState, reading_times: tuple[ReadingTime, ...], failed: dict[Source, Reason]
) -> Iterator[Sample]:
    for reading in reading_times:
        labels = (str(reading.source),)
        yield Sample(catalog.SOURCE_UP, labels, float(reading.source not in failed))
        yield Sample(catalog.SOURCE_READ_SECONDS, labels, reading.seconds)
    for (source, reason), count in state.failures.items():
        yield Sample(catalog.SOURCE_FAILURES, (str(source), str(reason)), float(count))
    for source, seconds in state.last_success_seconds.items():
        yield Sample(catalog.SOURCE_LAST_SUCCESS, (str(source),), seconds)
    yield from _skew({reading.source: reading for reading in reading_times if reading.source not in failed})


def _skew(times: dict[Source, ReadingTime]) -> Iterator[Sample]:
    if Source.ENGINE in times and Source.NVML in times:
        difference = times[Source.ENGINE].ended_monotonic_seconds - times[Source.NVML].ended_monotonic_seconds
        yield Sample(catalog.SAMPLE_SKEW, (), abs(difference))
