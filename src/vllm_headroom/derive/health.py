"""Whether and when each source was read successfully, and how long reading took."""

from typing import Final

from msgspec import Struct

from vllm_headroom import catalog
from vllm_headroom.model import Sample, Snapshot
from vllm_headroom.vocabulary import REASONS, Source


class HealthState(Struct, frozen=True, kw_only=True):
    """The failures and successes of the sources since the daemon started."""

    failures: dict[tuple[str, str], int]
    """How often each source has failed for each reason, by the labels `source` and `reason`."""

    last_success_seconds: dict[Source, float]
    """When each source was last read successfully, in seconds since the epoch."""


def _list_zeros(*sources: Source) -> dict[tuple[str, str], int]:
    """Return the initial failure counts of these sources, by their labels."""
    counts = {}
    for source in sources:
        for reason in REASONS[source]:
            counts[str(source), str(reason)] = 0
    return counts


INITIAL: Final = HealthState(
    failures=_list_zeros(Source.ENGINE, Source.NVML, Source.PROCESS),
    last_success_seconds={},
)
"""The counts of all sources except the probe and the log start at 0. The counts of the probe and
the log are added when each is first read. The counts of the probe and the log are therefore
exported only if a probe folder or a log is configured.
"""

PROBE_ZEROS: Final = _list_zeros(Source.PROBE)
"""The probe's initial counts, which are added when its folder is first read."""

LOG_ZEROS: Final = _list_zeros(Source.LOG)
"""The log's initial counts, which are added when it is first read."""


def derive_health(state: HealthState, snapshot: Snapshot) -> tuple[HealthState, tuple[Sample, ...]]:
    """Return the health series of every source that was read in this snapshot."""
    state = _count_readings(state, snapshot)
    failed_sources = {failure.source for failure in snapshot.failures}
    samples = []
    for reading in snapshot.reading_times:
        labels = (str(reading.source),)
        is_up = reading.source not in failed_sources
        samples.append(Sample(catalog.SOURCE_UP, labels, float(is_up)))
        samples.append(Sample(catalog.SOURCE_READ_SECONDS, labels, reading.seconds))
    for failure_labels, count in state.failures.items():
        samples.append(Sample(catalog.SOURCE_FAILURES, failure_labels, float(count)))
    for source, success_seconds in state.last_success_seconds.items():
        samples.append(Sample(catalog.SOURCE_LAST_SUCCESS, (str(source),), success_seconds))
    skew_seconds = _measure_skew(snapshot, failed_sources)
    if skew_seconds is not None:
        samples.append(Sample(catalog.SAMPLE_SKEW, (), skew_seconds))
    return state, tuple(samples)


def _measure_skew(snapshot: Snapshot, failed_sources: set[Source]) -> float | None:
    """Return the time between reading the engine and the GPUs.

    Returns None if either reading failed.
    """
    ends_seconds = {}
    # A failed reading may have waited for its timeout, so its end time is meaningless.
    for reading in snapshot.reading_times:
        if reading.source not in failed_sources:
            ends_seconds[reading.source] = reading.ended_monotonic_seconds
    engine_seconds = ends_seconds.get(Source.ENGINE)
    gpus_seconds = ends_seconds.get(Source.NVML)
    if engine_seconds is None or gpus_seconds is None:
        return None
    return abs(engine_seconds - gpus_seconds)


def _count_readings(state: HealthState, snapshot: Snapshot) -> HealthState:
    """Return the state with this snapshot's failures and successes added."""
    failures = dict(state.failures)
    # The probe's counts are exported as soon as its folder has been read.
    if snapshot.probe is not None:
        failures = PROBE_ZEROS | failures
    if snapshot.log is not None:
        failures = LOG_ZEROS | failures
    reasons = {failure.source: failure.reason for failure in snapshot.failures}
    for source, reason in reasons.items():
        labels = (str(source), str(reason))
        failures[labels] = failures.get(labels, 0) + 1
    last_success_seconds = dict(state.last_success_seconds)
    for reading in snapshot.reading_times:
        if reading.source not in reasons:
            last_success_seconds[reading.source] = snapshot.time_seconds
    return HealthState(failures=failures, last_success_seconds=last_success_seconds)
