from __future__ import annotations

import pytest

from tests.samples import A_GPU, AN_ENGINE, engine, failure, gpu, page, snapshot
from vllm_headroom import catalog
from vllm_headroom.model import EnginePage, Failure, Metric, Sample
from vllm_headroom.vocabulary import Reason, Source
from vllm_headroom_tools.load.sampling import LoadObservation

OTHER_ENGINE = ("m", "1")
GONE = Failure(source=Source.ENGINE, reason=Reason.UNREACHABLE, message="it is gone")


def samples(*values: tuple[Metric, tuple[str, ...], float]) -> tuple[Sample, ...]:
    return tuple(Sample(metric, labels, value) for metric, labels, value in values)


def test_memory_has_its_first_its_newest_and_its_highest_value() -> None:
    observed = LoadObservation()
    for n_bytes in (700, 900, 800):
        observed.add(snapshot(gpus=(gpu(engine=n_bytes),)), samples((catalog.HOST_MEMORY, ("worker",), n_bytes / 10)))

    gpu_memory, host = observed.gpu_bytes[A_GPU], observed.host_bytes[("worker",)]
    assert (gpu_memory.start, gpu_memory.newest, gpu_memory.highest) == (700, 800, 900)
    assert (host.start, host.newest, host.highest) == (70, 80, 90)


def test_what_is_not_known_is_absent() -> None:
    observed = LoadObservation()
    observed.add(snapshot(gpus=failure(Source.NVML)), ())
    observed.add(snapshot(gpus=(gpu(held=None),)), ())

    assert not observed.gpu_bytes
    assert not observed.host_bytes
    assert observed.find_engine_figure(catalog.ENGINE_RUNNING) is None
    assert observed.find_bytes_per_request(A_GPU) is None


def test_engines_count_together_and_the_fullest_cache_counts() -> None:
    observed = LoadObservation()
    values = (
        (catalog.ENGINE_RUNNING, AN_ENGINE, 3.0),
        (catalog.ENGINE_RUNNING, OTHER_ENGINE, 4.0),
        (catalog.ENGINE_KV_USED, AN_ENGINE, 0.9),
        (catalog.ENGINE_KV_USED, OTHER_ENGINE, 0.2),
    )
    observed.add(snapshot(), samples(*values))
    observed.add(snapshot(), samples((catalog.ENGINE_RUNNING, AN_ENGINE, 1.0)))

    running, used = (
        observed.find_engine_figure(catalog.ENGINE_RUNNING),
        observed.find_engine_figure(catalog.ENGINE_KV_USED),
    )
    assert running is not None
    assert used is not None
    assert (running.highest, running.newest) == (7, 1)
    assert used.highest == 0.9


@pytest.mark.parametrize(("counts", "grown"), [((5, 5, 9), 4), ((5,), 0), ((5, 2, 9), None)])
def test_a_counter_grows_unless_it_began_again(counts: tuple[float, ...], grown: float | None) -> None:
    observed = LoadObservation()
    for count in counts:
        observed.add(snapshot(), samples((catalog.ENGINE_PREEMPTIONS, AN_ENGINE, count)))

    assert observed.count_growth(catalog.ENGINE_PREEMPTIONS) == grown
    assert observed.count_growth(catalog.ENGINE_FINISHED) is None


def test_the_cost_of_a_running_request_is_the_median() -> None:
    observed = LoadObservation()
    for cost in (10, 1000, 20):
        observed.add(snapshot(), samples((catalog.MEMORY_PER_RUNNING_REQUEST, A_GPU, cost)))

    assert observed.find_bytes_per_request(A_GPU) == 20


def started(*times: float | None) -> EnginePage:
    return page(*(engine(str(place), started_at_seconds=time) for place, time in enumerate(times)))


def ended(*pages: EnginePage | Failure) -> str | None:
    observed = LoadObservation()
    for engine_page in pages:
        observed.add(snapshot(engines=engine_page), ())
    return observed.engine_end


@pytest.mark.parametrize(
    ("first_page", "last_page", "expected_end"),
    [
        (started(1.0), GONE, "the engine is gone: its page refuses connections"),
        (started(1.0), failure(Source.ENGINE), "the engine is gone: its page refuses connections"),
        (started(1.0), started(2.0), "the engine was restarted meanwhile"),
        (started(1.0, 1.5), started(1.5, 1.0), None),
        (started(1.0), started(None), None),
        (started(None), started(None), None),
        (GONE, GONE, None),
        (GONE, started(1.0), None),
    ],
)
def test_how_an_engine_ended(
    first_page: EnginePage | Failure, last_page: EnginePage | Failure, expected_end: str | None
) -> None:
    assert ended(first_page, last_page) == expected_end


def test_a_page_that_comes_late_is_no_end() -> None:
    late = Failure(source=Source.ENGINE, reason=Reason.TIMEOUT, message="it is late")

    assert ended(started(1.0), late) is None
    assert ended() is None


def test_each_source_that_failed_is_counted_with_its_newest_failure() -> None:
    observed = LoadObservation()
    newest = Failure(source=Source.NVML, reason=Reason.TIMEOUT, message="it hangs")
    observed.add(snapshot(at=0, gpus=failure(Source.NVML)), ())
    observed.add(snapshot(at=1), ())
    observed.add(snapshot(at=2, gpus=newest), ())

    assert (observed.samples, observed.seconds) == (3, 2.0)
    assert observed.failures == {Source.NVML: (2, newest)}
