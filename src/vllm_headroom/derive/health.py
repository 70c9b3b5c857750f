"""The state of each source: whether and when it could be read, and how long it took."""

from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.model import Sample, Snapshot
from vllm_headroom.vocabulary import REASONS, Attribution, Source


class HealthState(Struct, frozen=True, kw_only=True):
    """What happened to the sources since the daemon started."""

    failures: dict[tuple[str, str], int]
    """How often they failed, by the labels `source` and `reason`."""

    last_success_seconds: dict[Source, float]
    """When each was last read, in seconds since the epoch."""


ZEROS: Final = {
    source: {(str(source), str(reason)): 0 for reason in REASONS[source]} for source in REASONS
}
"""The counts that each source starts with, by their labels."""

INITIAL: Final = HealthState(
    failures=ZEROS[Source.ENGINE] | ZEROS[Source.NVML] | ZEROS[Source.PROCESS],
    last_success_seconds={},
)
"""The probe's failures start when its folder is first read: without a folder there are none."""


def derive_health(state: HealthState, snapshot: Snapshot) -> tuple[HealthState, tuple[Sample, ...]]:
    """Return the health series of every source that was read in this snapshot."""
    state = _count_readings(state, snapshot)
    failed_sources = {failure.source for failure in snapshot.failures}
    samples = []
    ends_seconds = {}
    for reading in snapshot.reading_times:
        labels = (str(reading.source),)
        is_up = reading.source not in failed_sources
        samples.append(Sample(catalog.SOURCE_UP, labels, float(is_up)))
        samples.append(Sample(catalog.SOURCE_READ_SECONDS, labels, reading.seconds))
        if is_up:
            ends_seconds[reading.source] = reading.ended_monotonic_seconds
    for failure_labels, count in state.failures.items():
        samples.append(Sample(catalog.SOURCE_FAILURES, failure_labels, float(count)))
    for source, success_seconds in state.last_success_seconds.items():
        samples.append(Sample(catalog.SOURCE_LAST_SUCCESS, (str(source),), success_seconds))
    if Source.ENGINE in ends_seconds and Source.NVML in ends_seconds:
        skew_seconds = abs(ends_seconds[Source.ENGINE] - ends_seconds[Source.NVML])
        samples.append(Sample(catalog.SAMPLE_SKEW, (), skew_seconds))
    return state, tuple(samples)


def _count_readings(state: HealthState, snapshot: Snapshot) -> HealthState:
    """Return the state with this snapshot's failures and successes."""
    failures = dict(state.failures)
    if snapshot.probe is not None:
        failures = ZEROS[Source.PROBE] | failures
    reasons = {failure.source: failure.reason for failure in snapshot.failures}
    for source, reason in reasons.items():
        labels = (str(source), str(reason))
        failures[labels] = failures.get(labels, 0) + 1
    last_success_seconds = dict(state.last_success_seconds)
    for reading in snapshot.reading_times:
        if reading.source not in reasons:
            last_success_seconds[reading.source] = snapshot.time_seconds
    return HealthState(failures=failures, last_success_seconds=last_success_seconds)


def add_lost_gpus(snapshot: Snapshot) -> Snapshot:
    """Attribute GPUs that cannot be opened to an engine some of whose GPUs are missing.

    Such a GPU has no UUID and no process list: it is the engine's if no more GPUs are unreadable
    than missing. A readable GPU is then not assumed to be the engine's, even if it is the only one
    left.
    """
    if snapshot.engine_status is None or not snapshot.devices:
        return snapshot
    engine_uuids = {uuid for uuid, _ in snapshot.engine_status.first_rooms}
    missing_uuids = sorted(engine_uuids - {gpu.reading.uuid for gpu in snapshot.devices})
    if not missing_uuids:
        return snapshot
    unopened = [gpu for gpu in snapshot.devices if not gpu.reading.uuid]
    are_all_lost = len(unopened) <= len(missing_uuids)
    lost_uuid = missing_uuids[0] if len(missing_uuids) == 1 else ""
    gpus = []
    for gpu in snapshot.devices:
        is_assumed = gpu.attribution is Attribution.SINGLE
        if are_all_lost and not gpu.reading.uuid:
            reading = replace(gpu.reading, uuid=lost_uuid)
            attribution = gpu.attribution or Attribution.PROCESS
            gpus.append(replace(gpu, reading=reading, attribution=attribution))
        elif is_assumed and gpu.reading.uuid not in engine_uuids:
            gpus.append(replace(gpu, attribution=None, held_bytes=None))
        else:
            gpus.append(gpu)
    return replace(snapshot, gpus=tuple(gpus))
