"""The health of the sources."""

from __future__ import annotations

from tests.samples import failure, only, probed, snapshot, values
from vllm_headroom import catalog
from vllm_headroom.derive.health import INITIAL, derive_health
from vllm_headroom.model import LogReading, ProbeReadings, ReadingTime
from vllm_headroom.vocabulary import REASONS, Source


def times(engine_ended: float = 10.0, nvml_ended: float = 10.5) -> tuple[ReadingTime, ...]:
    return (
        ReadingTime(source=Source.ENGINE, seconds=0.25, ended_monotonic_seconds=engine_ended),
        ReadingTime(source=Source.NVML, seconds=0.5, ended_monotonic_seconds=nvml_ended),
        ReadingTime(source=Source.PROCESS, seconds=0.125, ended_monotonic_seconds=10.0),
    )


def test_a_failed_source_is_down_and_the_others_are_up() -> None:
    _, samples = derive_health(INITIAL, snapshot(engines=failure(Source.ENGINE), reading_times=times()))

    assert values(samples, catalog.SOURCE_UP) == {("engine",): 0.0, ("nvml",): 1.0, ("process",): 1.0}
    assert values(samples, catalog.SOURCE_READ_SECONDS)[("engine",)] == 0.25


def test_every_reason_starts_at_zero_and_failures_add_up() -> None:
    state, samples = derive_health(INITIAL, snapshot(reading_times=times()))
    assert set(values(samples, catalog.SOURCE_FAILURES).values()) == {0.0}
    assert set(values(samples, catalog.SOURCE_FAILURES)) == {
        (str(source), str(reason))
        for source in REASONS
        if source not in (Source.PROBE, Source.LOG)
        for reason in REASONS[source]
    }

    for _ in range(3):
        state, samples = derive_health(state, snapshot(engines=failure(Source.ENGINE), reading_times=times()))

    assert values(samples, catalog.SOURCE_FAILURES)[("engine", "unreachable")] == 3.0


def test_the_probe_counts_from_where_its_folder_is_read() -> None:
    state, samples = derive_health(INITIAL, snapshot(probe=ProbeReadings(present=(probed(),)), reading_times=times()))
    assert values(samples, catalog.SOURCE_FAILURES)[("probe", "malformed")] == 0.0

    _, samples = derive_health(state, snapshot(probe=failure(Source.PROBE), reading_times=times()))

    assert values(samples, catalog.SOURCE_FAILURES)[("probe", "not_found")] == 1.0


def test_the_log_counts_from_where_it_is_read() -> None:
    state, samples = derive_health(INITIAL, snapshot(log=LogReading(start=None), reading_times=times()))
    assert values(samples, catalog.SOURCE_FAILURES)[("log", "not_found")] == 0.0

    _, samples = derive_health(state, snapshot(log=failure(Source.LOG), reading_times=times()))

    assert values(samples, catalog.SOURCE_FAILURES)[("log", "not_found")] == 1.0


def test_files_of_probes_that_no_longer_write_are_no_success() -> None:
    reading = (ReadingTime(source=Source.PROBE, seconds=0.1, ended_monotonic_seconds=10.0),)
    for readings in (ProbeReadings(silent=(probed(),)), ProbeReadings(others=(probed(),))):
        _, samples = derive_health(INITIAL, snapshot(probe=readings, reading_times=reading))

        assert values(samples, catalog.SOURCE_UP) == {("probe",): 0.0}
        assert values(samples, catalog.SOURCE_FAILURES)[("probe", "not_found")] == 1.0


def test_the_last_success_stays_while_a_source_fails() -> None:
    state, _ = derive_health(INITIAL, snapshot(at=5.0, reading_times=times()))
    _, samples = derive_health(state, snapshot(at=10.0, engines=failure(Source.ENGINE), reading_times=times()))

    assert values(samples, catalog.SOURCE_LAST_SUCCESS) == {
        ("engine",): 1_760_000_005.0,
        ("nvml",): 1_760_000_010.0,
        ("process",): 1_760_000_010.0,
    }


def test_a_source_that_never_answered_has_no_last_success() -> None:
    _, samples = derive_health(INITIAL, snapshot(engines=failure(Source.ENGINE), reading_times=times()))

    assert ("engine",) not in values(samples, catalog.SOURCE_LAST_SUCCESS)


def test_the_skew_is_between_the_ends_of_the_two_readings() -> None:
    _, samples = derive_health(INITIAL, snapshot(reading_times=times(engine_ended=12.0, nvml_ended=12.75)))

    assert only(samples, catalog.SAMPLE_SKEW).value == 0.75


def test_there_is_no_skew_without_both_readings() -> None:
    _, samples = derive_health(INITIAL, snapshot(gpus=failure(Source.NVML), reading_times=times()))

    assert values(samples, catalog.SAMPLE_SKEW) == {}
