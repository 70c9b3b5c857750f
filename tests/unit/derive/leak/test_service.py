"""What a derivation is shown of an engine that loads, has not worked yet, or has died."""

from __future__ import annotations

import pytest

from tests.samples import engine, page, snapshot, values
from tests.unit.derive.life.watch import (
    BEGAN,
    LOGIN,
    NEXT,
    REFUSED,
    SERVER,
    SILENT,
    UNSEEN,
    WHOLE,
    Watch,
    card,
    serving,
    working,
)
from vllm_headroom import catalog
from vllm_headroom.derive.leak.leak import keep_service
from vllm_headroom.derive.life.engine import derive_engine_state
from vllm_headroom.derive.prefix_cache import PrefixCacheState, derive_prefix_cache
from vllm_headroom.derive.tick import answer, build_derivations
from vllm_headroom.model import EnginePage, EngineProcess, Failure, Sample, Snapshot

HOUR = 3600


def test_nothing_is_in_service_before_the_engine_has_worked() -> None:
    watch = Watch()

    assert not watch.look(REFUSED).is_in_service
    assert not watch.look(working(0, running=0.0)).is_in_service
    assert watch.look(working(0, running=1.0)).is_in_service
    assert watch.look(working(0, running=0.0)).is_in_service


def test_an_engine_that_offers_no_statistics_has_worked_when_its_page_answers() -> None:
    assert Watch().look(page()).is_in_service


def test_v0_has_not_worked_before_its_first_request() -> None:
    assert not Watch().look(page(engine(model_name=""))).is_in_service


@pytest.mark.parametrize("page_failure", [SILENT, REFUSED, LOGIN])
def test_a_page_that_fails_while_the_engine_runs_stops_nothing(page_failure: Failure) -> None:
    assert serving().look(page_failure, after_seconds=HOUR).is_in_service
    assert serving(processes=UNSEEN).look(page_failure, after_seconds=HOUR).is_in_service


def test_a_run_that_ended_or_serves_nobody_is_out_of_service() -> None:
    assert not serving().look(REFUSED, processes=()).is_in_service
    assert not serving().look(REFUSED, processes=NEXT).is_in_service
    assert not serving().look(working(20), processes=(SERVER,)).is_in_service, "its core is dead, the page is its last"


def test_out_of_service_there_is_no_page_no_process_and_nothing_held() -> None:
    loading, watch = snapshot(engines=REFUSED, gpus=(card(30),), processes=WHOLE), Watch()
    watch.look(REFUSED)
    assert watch.seen is not None
    assert loading.engine_status is None

    for kept_snapshot in map(keep_service, (watch.seen, loading)):
        assert isinstance(kept_snapshot.engines, Failure)
        assert not isinstance(kept_snapshot.gpus, Failure)
        assert [gpu.held_bytes for gpu in kept_snapshot.gpus] == [None]
        assert kept_snapshot.processes == ()


def followed(watch: Watch, *, minutes: int, loads: tuple[EngineProcess, ...]) -> set[str]:
    """Return all leak states of a load of such a length that grows all the while, and of the idle hour after it."""
    leak = next(derivation for derivation in build_derivations() if derivation.name == "leak")
    state, seen_states, steps = leak.initial, set[str](), 12 * minutes
    for step in range(steps + 720):
        loads_on, held_gib = step < steps, 1 + 60 * min(1.0, step / steps)
        idle = working(0, running=0.0, started=loads[0].started_at_seconds)
        watch.look(REFUSED if loads_on else idle, processes=loads, gpus=(card(held_gib),))
        assert watch.seen is not None
        state, samples = answer(leak, state, watch.seen)
        for metric in (catalog.LEAK_STATE, catalog.HOST_LEAK_STATE):
            seen_states |= {labels[-1] for labels, value in values(samples, metric).items() if value}
    return seen_states


@pytest.mark.parametrize("minutes", [12, 30, 120])
def test_a_load_is_no_leak_however_long_and_an_engine_that_never_worked_is_not_stable(minutes: int) -> None:
    assert followed(Watch(), minutes=minutes, loads=WHOLE) == {"warming_up"}
    assert followed(serving(), minutes=minutes, loads=NEXT) == {"warming_up"}


def test_of_an_engine_that_is_not_known_to_have_worked_no_leak_state_is_made_up() -> None:
    leak = next(derivation for derivation in build_derivations() if derivation.name == "leak")

    def said(snapshot: Snapshot | None) -> set[str]:
        assert snapshot is not None
        _, samples = answer(leak, leak.initial, snapshot)
        return {labels[2] for labels, value in values(samples, catalog.LEAK_STATE).items() if value}

    down, asleep = serving(), Watch()
    down.look(REFUSED, processes=())
    asleep.look(working(0, running=0.0, awake=False))

    assert said(down.seen) == {"unknown"}
    assert said(asleep.seen) == {"asleep"}
    assert said(snapshot(engines=working(20))) == {"unknown"}, "whose life is not known"


def test_of_a_page_that_tells_nothing_of_work_it_is_unknown_whether_anything_leaks() -> None:
    """Dynamo's own series: the KV cache in use, and no request, token or step."""
    leak, watch = next(derivation for derivation in build_derivations() if derivation.name == "leak"), Watch()
    state = leak.initial
    watch.look(REFUSED)

    own = page(engine(kv_used_ratio=0.5, started_at_seconds=BEGAN))
    pages: list[EnginePage | Failure] = [*[own] * 720, SILENT, LOGIN]
    for engine_page in pages:
        watch.look(engine_page, gpus=(card(30 + watch.at / 300),))
        assert watch.seen is not None
        state, samples = answer(leak, state, watch.seen)
        gpus, host = (values(samples, metric).items() for metric in (catalog.LEAK_STATE, catalog.HOST_LEAK_STATE))
        assert [labels[-1] for labels, value in gpus if value] == ["unknown"]
        assert [labels for labels, value in host if value] == [(str(process.role), "unknown") for process in WHOLE]

    counted = watch.look(working(1))
    assert counted.is_in_service, "it tells of work after all"


def test_the_hit_ratio_ends_with_its_run() -> None:
    state, ratios = PrefixCacheState(), []
    watch = serving()
    for queries, processes in ((0.0, WHOLE), (100.0, WHOLE), (100.0, (SERVER,))):
        watch.look(working(20, prefix_queries_total=queries, prefix_hits_total=queries / 2), processes=processes)
        assert watch.seen is not None
        state, samples = derive_prefix_cache(state, watch.seen)
        ratios.append([sample.value for sample in samples])

    assert ratios == [[], [0.5], []]
    assert state == PrefixCacheState()


def test_what_is_known_of_a_run_is_exported() -> None:
    watch = serving()
    watch.look(working(20), after_seconds=12)
    assert watch.seen is not None

    samples = derive_engine_state(watch.seen)

    states = {labels[0]: value for labels, value in values(samples, catalog.ENGINE_STATE).items()}
    assert states == {"unknown": 0, "down": 0, "starting": 0, "serving": 1, "stalled": 0, "asleep": 0}
    assert values(samples, catalog.ENGINE_START) == {(): 1_760_000_000.0}
    assert values(samples, catalog.ENGINE_RESTARTS) == {(): 0.0}
    assert values(samples, catalog.ENGINE_EXITS) == {
        ("replaced",): 0,
        ("gone",): 0,
        ("out_of_memory",): 0,
        ("oom_killed",): 0,
        ("stopped",): 0,
        ("over_budget",): 0,
    }
    assert not values(samples, catalog.ENGINE_EXIT_REQUESTS)
    assert values(samples, catalog.ENGINE_PROGRESS_AGE) == {(): 12.0}
    assert not values(samples, catalog.ENGINE_KV_STRANDED)


def test_the_requests_that_an_exit_cut_off_stay_on_the_page_until_the_next_exit() -> None:
    watch = serving()
    watch.look(working(20, running=7, waiting=3.0))
    watch.look(REFUSED, processes=(), gpus=(card(0.5),))
    watch.look(REFUSED, processes=NEXT)
    life = watch.look(working(0, running=1, started=BEGAN + 9000), gpus=(card(70),))

    assert life.exit_requests == 10
    assert watch.seen is not None
    assert values(derive_engine_state(watch.seen), catalog.ENGINE_EXIT_REQUESTS) == {(): 10.0}
    watch.look(working(0, running=1, started=BEGAN + 9000, waiting=None))
    assert watch.look(REFUSED, processes=(), gpus=(card(0.5),)).exit_requests is None


def test_nothing_is_exported_of_a_run_that_is_not_known() -> None:
    none: tuple[Sample, ...] = ()

    assert derive_engine_state(snapshot()) == none
