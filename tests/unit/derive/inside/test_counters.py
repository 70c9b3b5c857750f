"""Counters go on while the processes that count come and go."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.samples import A_GPU, failure, gpu, probed, snapshot, values
from vllm_headroom import catalog
from vllm_headroom.derive.allocator_counts import MOST_COUNTS, Counts, derive_counters
from vllm_headroom.model import AllocatorReading, Failure, OomRecord, ProbedProcess, ProbeReadings, Sample
from vllm_headroom.vocabulary import Source


def worker(pid: int = 7, uuid: str = "GPU-a", oom: OomRecord | None = None, **counts: Any) -> ProbedProcess:
    return probed(pid=pid, devices=(AllocatorReading(uuid=uuid, **counts),), oom=oom)


def followed(*ticks: ProbeReadings | Failure | None) -> tuple[Counts, tuple[Sample, ...]]:
    state = Counts()
    samples: tuple[Sample, ...] = ()
    for probe in ticks:
        state, samples = derive_counters(state, snapshot(probe=probe))
    return state, samples


def retries(*ticks: ProbeReadings | Failure | None) -> float | None:
    return values(followed(*ticks)[1], catalog.ALLOCATOR_RETRIES).get(A_GPU)


def here(*processes: ProbedProcess) -> ProbeReadings:
    return ProbeReadings(present=processes)


def test_workers_of_one_gpu_count_together() -> None:
    assert retries(here(worker(7, retries=2), worker(8, uuid="gpu-A", retries=3))) == 5.0


def test_a_new_worker_counts_on_from_the_last_one() -> None:
    first_worker, second = worker(7, retries=4), worker(8, retries=1)

    assert retries(here(first_worker), here(second)) == 5.0
    assert retries(here(first_worker), ProbeReadings(present=(second,), others=(first_worker,))) == 5.0


def test_what_a_worker_counted_before_it_died_is_in_its_last_file() -> None:
    last_probe_readings = ProbeReadings(others=(worker(7, retries=9, ooms=1),))

    samples = followed(here(worker(7, retries=4, ooms=0)), last_probe_readings)[1]

    assert values(samples, catalog.ALLOCATOR_RETRIES) == {A_GPU: 9.0}
    assert values(samples, catalog.ALLOCATOR_OOMS) == {A_GPU: 1.0}


def test_an_error_that_only_the_observer_saw_counts() -> None:
    oom_record = OomRecord(at_seconds=1.0, uuid="GPU-a", seen=2)
    elsewhere = OomRecord(at_seconds=1.0, uuid="GPU-b", seen=2)

    assert values(followed(here(worker(oom=oom_record)))[1], catalog.ALLOCATOR_OOMS) == {A_GPU: 2.0}
    assert values(followed(here(worker(ooms=3, oom=oom_record)))[1], catalog.ALLOCATOR_OOMS) == {A_GPU: 3.0}
    assert values(followed(here(worker(oom=elsewhere)))[1], catalog.ALLOCATOR_OOMS) == {}


def test_a_reading_that_failed_has_no_series_and_loses_no_count() -> None:
    assert retries(here(worker(retries=4)), failure(Source.PROBE)) is None
    assert retries(here(worker(retries=4)), failure(Source.PROBE), here(worker(retries=6))) == 6.0
    assert retries(None) is None


def test_what_is_not_counted_is_absent() -> None:
    assert followed(here(worker()))[1] == ()
    assert followed(here(worker(uuid="GPU-b", retries=1)))[1] == ()
    state, samples = derive_counters(Counts(), snapshot(gpus=(gpu(attribution=None),), probe=here(worker(retries=1))))
    assert (state, samples) == (Counts(), ())


def test_what_is_remembered_is_bounded() -> None:
    state = Counts()
    for pid in range(MOST_COUNTS + 50):
        state, samples = derive_counters(state, snapshot(probe=here(worker(pid, retries=1))))

    assert len(state.last) == MOST_COUNTS
    assert values(samples, catalog.ALLOCATOR_RETRIES) == {A_GPU: MOST_COUNTS + 50.0}


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 50), st.booleans()), max_size=30))
def test_a_counter_never_falls(ticks: list[tuple[int, int, bool]]) -> None:
    state, total = Counts(), 0.0
    for pid, count, alive in ticks:
        probes = (worker(pid, retries=count),)
        state, samples = derive_counters(
            state, snapshot(probe=ProbeReadings(present=probes) if alive else ProbeReadings(others=probes))
        )
        now = values(samples, catalog.ALLOCATOR_RETRIES)[A_GPU]
        assert now >= total
        total = now
