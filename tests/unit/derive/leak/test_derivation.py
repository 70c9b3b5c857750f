"""The leak family on the page: load, GPUs, host and the ratio to a baseline."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from tests.samples import A_GPU, engine, failure, gpu, page, snapshot, values
from tests.unit.derive.leak.stretches import BASE, LEAK, RATE, STEP, TOTAL, leak
from vllm_headroom import catalog
from vllm_headroom.derive.leak.leak import LeakMemory, derive_leaks
from vllm_headroom.derive.per_request import BASELINE_READINGS, Baseline, Baselines, derive_baseline
from vllm_headroom.derive.verdicts import measure_watches
from vllm_headroom.model import EngineProcess, EngineStatus, Failure, HostMemory, Metric, Sample, Snapshot
from vllm_headroom.units import MIB
from vllm_headroom.vocabulary import EngineState, LeakState, Role, Source

FAMILY = (
    catalog.LEAK_RATE,
    catalog.LEAK_RATE_LOWER,
    catalog.LEAK_RATE_UPPER,
    catalog.LEAK_PER_REQUEST,
    catalog.LEAKED,
    catalog.TIME_TO_OOM,
    catalog.TIME_TO_OOM_LOWER,
)
SERVING = EngineStatus(state=EngineState.SERVING)
Change = Callable[[Snapshot, float], Snapshot]


def unchanged(sample: Snapshot, _seconds: float) -> Snapshot:
    return sample


def run(hours: float, shape: Callable[[float], float], change: Change = unchanged) -> Iterator[tuple[Sample, ...]]:
    """Yield what the leak derivation says at every reading of a GPU and a host process that grow alike."""
    state = LeakMemory()
    for turn in range(int(hours * 3600 / STEP)):
        seconds = turn * STEP
        size = int(BASE + shape(seconds))
        sample = snapshot(
            at=seconds,
            engines=page(engine(running=80.0, waiting=0.0, finished_total=seconds * RATE, started_at_seconds=1.0)),
            gpus=(gpu(total=TOTAL, used=size, engine=size, other=0),),
            processes=(EngineProcess(pid=7, role=Role.WORKER, rss_bytes=size, started_at_seconds=1.0),),
            engine_status=SERVING,
        )
        state, samples = derive_leaks(state, change(sample, seconds))
        yield samples


def states(samples: tuple[Sample, ...], metric: Metric = catalog.LEAK_STATE) -> set[str]:
    return {labels[-1] for labels, value in values(samples, metric).items() if value == 1.0}


def test_exactly_one_state_is_1_and_all_are_there() -> None:
    for samples in run(2, leak):
        shown = values(samples, catalog.LEAK_STATE)
        assert {labels[-1] for labels in shown} == set(LeakState)
        assert sorted(shown.values()) == [0.0] * 6 + [1.0]


def test_a_leak_goes_from_warming_up_through_growing_to_leaking_on_gpu_and_host() -> None:
    samples_over_time = list(run(2, leak, on_host(TOTAL)))

    for metric in (catalog.LEAK_STATE, catalog.HOST_LEAK_STATE):
        order = list(dict.fromkeys(state for samples in samples_over_time for state in states(samples, metric)))
        assert [state for state in order if state != "stable"] == ["warming_up", "growing", "leaking"]
    assert values(samples_over_time[-1], catalog.LEAK_PER_REQUEST)[A_GPU] == pytest.approx(LEAK, rel=0.05)
    assert values(samples_over_time[-1], catalog.HOST_LEAK_RATE)[("worker",)] == pytest.approx(LEAK * RATE, rel=0.05)


def on_host(limit_bytes: int | None, *, file_bytes: int = 0) -> Change:
    """Let the host memory in use be what only the one process has."""

    def change(sample: Snapshot, _seconds: float) -> Snapshot:
        assert not isinstance(sample.processes, Failure)
        (process,) = sample.processes
        host = HostMemory(used_bytes=process.rss_bytes, limit_bytes=limit_bytes)
        mapped = replace(process, rss_bytes=process.rss_bytes + file_bytes, file_bytes=file_bytes)
        return replace(sample, processes=(mapped,), host=host)

    return change


def test_the_time_until_the_kernel_kills_is_reported_where_the_limit_is_known() -> None:
    *_, last_samples = run(2, leak, on_host(TOTAL))
    *_, unknown = run(2, leak, on_host(None))

    expected_seconds = (TOTAL - BASE - leak(2 * 3600)) / (LEAK * RATE)
    assert values(last_samples, catalog.HOST_TIME_TO_OOM)[()] == pytest.approx(expected_seconds, rel=0.15)
    assert 0 < values(last_samples, catalog.HOST_TIME_TO_OOM_LOWER)[()] < expected_seconds
    assert not values(unknown, catalog.HOST_TIME_TO_OOM)
    assert values(unknown, catalog.HOST_LEAK_RATE)


def test_the_time_left_counts_down_between_two_estimates() -> None:
    """An estimate is made every two minutes; each block of half a minute takes its time from it."""
    samples_over_time = list(run(2, leak, on_host(TOTAL)))

    for metric in (catalog.TIME_TO_OOM, catalog.HOST_TIME_TO_OOM):
        times = [
            seconds_left for samples in samples_over_time[-30:] for seconds_left in values(samples, metric).values()
        ]
        assert len(times) == 30, "there is one in each sample"
        assert times[0] - times[-1] == pytest.approx(29 * STEP, abs=150)
        assert len(set(times)) >= 30 * STEP / 30 - 1


def test_the_time_left_is_there_soon_after_the_room_is_known() -> None:
    """A reading of the host that failed when the estimate was made does not cost the time until the next one."""

    def fails(sample: Snapshot, seconds: float) -> Snapshot:
        is_lost = seconds % 120 < 30  # every estimate is made within these
        return replace(on_host(TOTAL)(sample, seconds), **({"host": None} if is_lost else {}))

    has_time_left = [bool(values(samples, catalog.HOST_TIME_TO_OOM)) for samples in run(2, leak, fails)][-16:]

    assert sum(has_time_left) >= 8


def test_the_kernel_kills_at_the_last_page() -> None:
    """A GPU's allocator fails with some 100 MiB left, which a slow leak takes a quarter of an hour for."""
    *_, last_samples = run(2, leak, on_host(int(BASE + leak(2 * 3600)) + 64 * MIB))

    expected_seconds = 64 * MIB / (LEAK * RATE)
    assert values(last_samples, catalog.HOST_TIME_TO_OOM)[()] == pytest.approx(expected_seconds, abs=130), (
        "told by a block of two minutes"
    )


def test_two_roles_that_leak_fill_the_limit_twice_as_fast() -> None:
    def both(sample: Snapshot, seconds: float) -> Snapshot:
        (worker,) = on_host(TOTAL)(sample, seconds).processes  # type: ignore[misc]
        core = replace(worker, pid=8, role=Role.ENGINE_CORE)
        return replace(
            sample, processes=(worker, core), host=HostMemory(used_bytes=worker.rss_bytes, limit_bytes=TOTAL)
        )

    *_, alone = run(2, leak, on_host(TOTAL))
    *_, two = run(2, leak, both)

    for metric in (catalog.HOST_TIME_TO_OOM, catalog.HOST_TIME_TO_OOM_LOWER):
        assert values(two, metric)[()] == pytest.approx(values(alone, metric)[()] / 2)


def test_a_limit_that_is_reached_leaves_no_time() -> None:
    *_, last_samples = run(2, leak, on_host(int(BASE)))

    assert values(last_samples, catalog.HOST_TIME_TO_OOM) == {(): 0.0}


@pytest.mark.parametrize("late", [0.0, 5.0, 15.0], ids=["in time", "late", "on a busy machine"])
def test_a_core_that_fills_its_cgroup_in_17_minutes_is_leaking_while_a_third_of_them_is_left(late: float) -> None:
    """8 MB a second from the first sample on, at one request a second, however late the daemon comes to its samples."""
    rate, chance, state, seconds, leaks = 8_000_000, random.Random(1), LeakMemory(), 0.0, list[float]()  # noqa: S311 - it plays a scheduler
    while seconds < 1020:
        size = int(6e9 + rate * seconds + chance.gauss(0, 2 * MIB))
        sample = snapshot(
            at=seconds,
            engines=page(engine(running=1.0, waiting=0.0, finished_total=float(int(seconds)), started_at_seconds=1.0)),
            processes=(EngineProcess(pid=7, role=Role.ENGINE_CORE, rss_bytes=size, started_at_seconds=1.0),),
            host=HostMemory(used_bytes=size, limit_bytes=int(6e9) + 1020 * rate),
            engine_status=SERVING,
        )
        state, samples = derive_leaks(state, sample)
        if "leaking" in states(samples, catalog.HOST_LEAK_STATE):
            leaks.append(seconds)
            assert values(samples, catalog.HOST_TIME_TO_OOM)[()] == pytest.approx(1020 - seconds, rel=0.15, abs=60)
        seconds += 5 + (chance.expovariate(1 / late) if late else 0)

    assert 300 < leaks[0] < 680


def test_a_series_is_watched_from_its_first_reading_on() -> None:
    assert measure_watches(LeakMemory()) == {}
    state = LeakMemory()
    for seconds in (1000.0, 1600.0):
        sample = snapshot(
            at=seconds,
            processes=(EngineProcess(pid=7, role=Role.WORKER, rss_bytes=10**9, started_at_seconds=1.0),),
            engine_status=SERVING,
        )
        state, _ = derive_leaks(state, sample)

    assert measure_watches(state) == {"GPU-a": 600.0, "worker": 600.0}


def test_weights_that_are_mapped_from_disk_are_no_growth() -> None:
    def maps_more(sample: Snapshot, seconds: float) -> Snapshot:
        (worker,) = on_host(TOTAL, file_bytes=int(seconds * 10**8))(sample, seconds).processes  # type: ignore[misc]
        return replace(sample, processes=(worker,), host=HostMemory(used_bytes=int(BASE), limit_bytes=TOTAL))

    samples_over_time = list(run(2, lambda _: 0.0, maps_more))

    assert {state for samples in samples_over_time for state in states(samples, catalog.HOST_LEAK_STATE)} <= {
        "warming_up",
        "stable",
    }
    assert not any(values(samples, catalog.HOST_TIME_TO_OOM) for samples in samples_over_time)


def test_a_leak_that_is_swapped_out_is_one() -> None:
    """As in ollama/ollama#18106: 9.3 GiB in swap and 60 MiB resident."""

    def swaps(sample: Snapshot, seconds: float) -> Snapshot:
        (worker,) = on_host(None)(sample, seconds).processes  # type: ignore[misc]
        resident_bytes = 60 * MIB
        swapped = replace(worker, rss_bytes=resident_bytes, swap_bytes=int(leak(8 * seconds)))
        return replace(sample, processes=(swapped,), host=HostMemory(used_bytes=resident_bytes))

    *_, last_samples = run(2, leak, swaps)

    assert "leaking" in states(last_samples, catalog.HOST_LEAK_STATE)
    assert values(last_samples, catalog.HOST_LEAK_RATE)[("worker",)] == pytest.approx(8 * LEAK * RATE, rel=0.05)


def test_the_figures_of_a_leak_are_absent_unless_it_grows() -> None:
    for samples in run(1, lambda _: 0.0):
        assert not any(values(samples, metric) for metric in (*FAMILY, catalog.HOST_LEAK_RATE))


def test_they_are_all_there_while_it_leaks() -> None:
    *_, last_samples = run(2, leak)

    assert all(values(last_samples, metric) for metric in FAMILY)


def test_a_gpu_that_is_not_the_engines_or_cannot_be_read_has_no_series() -> None:
    def lose(sample: Snapshot, _seconds: float) -> Snapshot:
        return replace(sample, gpus=failure(Source.NVML))

    def give_away(sample: Snapshot, _seconds: float) -> Snapshot:
        return replace(sample, gpus=(gpu(attribution=None),))

    for change in (lose, give_away):
        assert not any(values(samples, catalog.LEAK_STATE) for samples in run(0.1, leak, change))


def test_memory_that_is_unknown_for_now_is_unknown_and_keeps_the_verdict() -> None:
    def forget(sample: Snapshot, seconds: float) -> Snapshot:
        if seconds != 2 * 3600 - 2 * STEP:
            return sample
        return replace(sample, gpus=(gpu(total=TOTAL, used=TOTAL // 2, held=None),))

    *_, samples_before, unknown, samples_after = run(2, leak, forget)

    assert [states(samples) for samples in (samples_before, unknown, samples_after)] == [
        {"leaking"},
        {"unknown"},
        {"leaking"},
    ]
    assert not values(unknown, catalog.LEAK_RATE)


def test_a_sleeping_engine_is_asleep() -> None:
    def sleep(sample: Snapshot, seconds: float) -> Snapshot:
        return replace(sample, engines=page(engine(running=0.0, awake=False))) if seconds > 1800 else sample

    *_, last_samples = run(0.6, lambda _: 0.0, sleep)

    assert states(last_samples) == {"asleep"}


def test_changing_load_is_unsettled_and_level_load_is_stable() -> None:
    def change(sample: Snapshot, seconds: float) -> Snapshot:
        running = 80.0 if seconds < 3600 else 20.0
        return replace(sample, engines=page(engine(running=running, finished_total=seconds * RATE)))

    samples_over_time = list(run(1.3, lambda _: 0.0, change))

    assert states(samples_over_time[int(3500 / STEP)]) == {"stable"}
    assert values(samples_over_time[int(3500 / STEP)], catalog.LOAD_STABLE) == {(): 1.0}
    assert states(samples_over_time[int(3900 / STEP)]) == {"unsettled"}
    assert values(samples_over_time[int(3900 / STEP)], catalog.LOAD_STABLE) == {(): 0.0}
    assert values(samples_over_time[-1], catalog.LOAD_STABLE) == {(): 1.0}


def test_the_delta_counts_from_when_load_became_stable() -> None:
    samples_over_time = list(run(0.5, leak))
    became = next(turn for turn, samples in enumerate(samples_over_time) if values(samples, catalog.LOAD_STABLE))

    assert values(samples_over_time[became], catalog.MEMORY_DELTA) == {A_GPU: 0.0}
    grown = leak(len(samples_over_time) * STEP - STEP) - leak(became * STEP)
    assert values(samples_over_time[-1], catalog.MEMORY_DELTA)[A_GPU] == pytest.approx(grown, abs=2)


def test_load_is_unknown_without_the_page_and_before_ten_minutes() -> None:
    def deafen(sample: Snapshot, seconds: float) -> Snapshot:
        return replace(sample, engines=failure(Source.ENGINE)) if seconds > 1200 else sample

    samples_over_time = list(run(0.4, lambda _: 0.0, deafen))

    assert not values(samples_over_time[int(500 / STEP)], catalog.LOAD_STABLE)
    assert values(samples_over_time[int(900 / STEP)], catalog.LOAD_STABLE)
    assert not values(samples_over_time[-1], catalog.LOAD_STABLE)


def test_gpus_in_another_order_are_judged_alike() -> None:
    def twice(reverse: bool) -> Change:  # noqa: FBT001 - two orders
        def change(sample: Snapshot, _seconds: float) -> Snapshot:
            assert not isinstance(sample.gpus, Failure)
            pair = (sample.gpus[0], gpu(index=1, uuid="GPU-b", total=TOTAL, used=BASE, engine=BASE))
            return replace(sample, gpus=pair[::-1] if reverse else pair)

        return change

    *_, straight = run(2, leak, twice(reverse=False))
    *_, turned = run(2, leak, twice(reverse=True))

    assert values(straight, catalog.LEAK_STATE) == values(turned, catalog.LEAK_STATE)
    assert states(straight) == {"leaking", "stable"}


def ratios(held_bytes: Callable[[int], int], turns: int, configured: float | None = None) -> list[float | None]:
    state, ratio_list = Baselines(), []
    for turn in range(turns):
        running = 10.0 if turn % 2 else 20.0
        sample = snapshot(
            at=turn * 5.0,
            engines=page(engine(running=running, finished_total=2000.0 + turn, started_at_seconds=1.0)),
            gpus=(gpu(total=10**12, used=held_bytes(turn), engine=held_bytes(turn)),),
            engine_status=SERVING,
        )
        state, samples = derive_baseline(state, sample, configured_bytes=configured)
        ratio_list.append(values(samples, catalog.MEMORY_PER_REQUEST_RATIO).get(A_GPU))
    return ratio_list


def test_the_ratio_is_to_what_was_learned_at_comparable_load() -> None:
    learning = 2 * BASELINE_READINGS

    ratio_list = ratios(lambda turn: 9_500 if turn <= learning else 10_500, learning + 10)

    assert ratio_list[learning - 2] is None
    assert ratio_list[-1] == pytest.approx(10_500 / 9_500)


def test_a_configured_baseline_needs_no_learning() -> None:
    assert ratios(lambda _: 9_500, 1, configured=500.0) == [pytest.approx(475 / 500)]


def test_a_configured_baseline_is_compared_only_at_full_load() -> None:
    def at(running: float, seconds: float, state: Baselines) -> tuple[Baselines, tuple[Sample, ...]]:
        tick_snapshot = replace(
            snapshot(engines=page(engine(running=running)), gpus=(gpu(total=10**12, used=9_500, engine=9_500),)),
            time_seconds=seconds,
            engine_status=SERVING,
        )
        return derive_baseline(state, tick_snapshot, configured_bytes=500.0)

    state, by_day = at(10.0, 0.0, Baselines())
    state, by_night = at(2.0, 3_600.0, state)
    _, a_quieter_week = at(2.0, 3 * 86_400.0, state)

    assert [len(by_day), len(by_night), len(a_quieter_week)] == [1, 0, 1]


def test_a_baseline_of_another_run_is_forgotten() -> None:
    state = Baselines(run_id="1.000", finished_total=5000.0, bands={"GPU-a": {24: Baseline(BASELINE_READINGS, 1.0)}})
    sample = snapshot(
        engines=page(engine(running=10.0, finished_total=6000.0, started_at_seconds=2.0)), engine_status=SERVING
    )

    state, samples = derive_baseline(state, sample, configured_bytes=None)

    assert samples == ()
    assert all(count < BASELINE_READINGS for bands in state.bands.values() for count, _ in bands.values())


def test_what_is_not_in_service_has_no_ratio() -> None:
    sample = snapshot(engines=page(engine(running=10.0)), gpus=(gpu(total=10**12, used=9_500, engine=9_500),))
    lost = EngineStatus(state=EngineState.STALLED, is_in_service=False)

    derived = [
        derive_baseline(Baselines(), replace(sample, engine_status=life), configured_bytes=500.0)
        for life in (SERVING, lost, None)
    ]

    assert [len(samples) for _, samples in derived] == [1, 0, 0]


def test_there_is_no_ratio_while_nothing_runs_or_one_engine_does_not_say() -> None:
    for running in (0.0, None):
        sample = snapshot(engines=page(engine(running=running, finished_total=5000.0)), engine_status=SERVING)
        assert derive_baseline(Baselines(), sample, configured_bytes=1.0)[1] == ()
