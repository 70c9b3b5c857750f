"""The state of each source: whether and when it could be read, and how long it took."""

from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.model import Gpu, Sample, Snapshot
from vllm_headroom.vocabulary import REASONS, Attribution, Source


class HealthState(Struct, frozen=True, kw_only=True):
    """Failures since the daemon started, by their labels, and each source's last success in epoch seconds."""

    failures: dict[tuple[str, str], int]
    last_success_seconds: dict[Source, float]


ZEROS: Final = {
    source: {(str(source), str(reason)): 0 for reason in REASONS[source]} for source in REASONS
}

INITIAL: Final = HealthState(
    failures={
        labels: 0 for source in ZEROS if source is not Source.PROBE for labels in ZEROS[source]
    },
    last_success_seconds={},
)
"""The probe's failures start when its folder is first read: without a folder there are none."""


def derive_health(state: HealthState, snapshot: Snapshot) -> tuple[HealthState, tuple[Sample, ...]]:
    """Return the health series of every source that was read in this snapshot."""
    failed = {failure.source: failure.reason for failure in snapshot.failures}
    failures = {**({} if snapshot.probe is None else ZEROS[Source.PROBE]), **state.failures}
    for source, reason in failed.items():
        failures[str(source), str(reason)] = failures.get((source, reason), 0) + 1
    succeeded = {
        reading.source: snapshot.time_seconds
        for reading in snapshot.reading_times
        if reading.source not in failed
    }
    state = HealthState(
        failures=failures, last_success_seconds=state.last_success_seconds | succeeded
    )
    samples, ends = [], dict[Source, float]()
    for reading in snapshot.reading_times:
        labels, is_up = (str(reading.source),), reading.source not in failed
        samples.append(Sample(catalog.SOURCE_UP, labels, float(is_up)))
        samples.append(Sample(catalog.SOURCE_READ_SECONDS, labels, reading.seconds))
        ends |= {reading.source: reading.ended_monotonic_seconds} if is_up else {}
    samples += [
        Sample(catalog.SOURCE_FAILURES, labels, float(count)) for labels, count in failures.items()
    ]
    known = state.last_success_seconds.items()
    samples += [
        Sample(catalog.SOURCE_LAST_SUCCESS, (str(source),), seconds) for source, seconds in known
    ]
    if Source.ENGINE in ends and Source.NVML in ends:
        samples.append(
            Sample(catalog.SAMPLE_SKEW, (), abs(ends[Source.ENGINE] - ends[Source.NVML]))
        )
    return state, tuple(samples)


def add_lost_gpus(snapshot: Snapshot) -> Snapshot:
    """Attribute GPUs that cannot be opened to an engine some of whose GPUs are missing.

    Such a GPU has no UUID and no process list: it is the engine's if no more GPUs are unreadable than missing. A
    readable GPU is then not assumed to be the engine's, even if it is the only one left.
    """
    known = {} if snapshot.engine_status is None else dict(snapshot.engine_status.first_rooms)
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
