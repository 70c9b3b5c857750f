"""The state of each source: whether and when it could be read, and how long it took."""

from collections.abc import Iterator
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.model import Gpu, ReadingTime, Sample, Snapshot
from vllm_headroom.vocabulary import REASONS, Attribution, Reason, Source


class HealthState(Struct, frozen=True, kw_only=True):
    """Failures since the daemon started, by their labels, and each source's last success in epoch seconds."""

    failures: dict[tuple[str, str], int]
    last_success_seconds: dict[Source, float]


def _zero_counts(source: Source) -> dict[tuple[str, str], int]:
    return {(str(source), str(reason)): 0 for reason in REASONS[source]}


INITIAL: Final = HealthState(
    failures={labels: 0 for source in REASONS if source is not Source.PROBE for labels in _zero_counts(source)},
    last_success_seconds={},
)
"""The probe's failures start when its folder is first read: without a folder there are none."""


def derive_health(state: HealthState, snapshot: Snapshot) -> tuple[HealthState, tuple[Sample, ...]]:
    """Return the health series of every source that was read in this snapshot."""
    failed = {failure.source: failure.reason for failure in snapshot.failures}
    failures = {**({} if snapshot.probe is None else _zero_counts(Source.PROBE)), **state.failures}
    for source, reason in failed.items():
        failures[str(source), str(reason)] = failures.get((source, reason), 0) + 1
    succeeded = {
        reading.source: snapshot.time_seconds for reading in snapshot.reading_times if reading.source not in failed
    }
    following = HealthState(failures=failures, last_success_seconds=state.last_success_seconds | succeeded)
    return following, tuple(_make_samples(following, snapshot.reading_times, failed))


def _make_samples(
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
    ends = {each.source: each.ended_monotonic_seconds for each in reading_times if each.source not in failed}
    if Source.ENGINE in ends and Source.NVML in ends:
        yield Sample(catalog.SAMPLE_SKEW, (), abs(ends[Source.ENGINE] - ends[Source.NVML]))


def add_lost_gpus(snapshot: Snapshot) -> Snapshot:
    """Attribute GPUs that cannot be opened to an engine some of whose GPUs are missing.

    Such a GPU has no UUID and no process list: it is the engine's if no more GPUs are unreadable than missing. A
    readable GPU is then not assumed to be the engine's, even if it is the only one left.
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
