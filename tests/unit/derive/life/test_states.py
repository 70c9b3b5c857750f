"""Which evidence makes which state."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.samples import engine, page
from tests.unit.derive.life.watch import (
    BEGAN,
    CORE,
    LOGIN,
    NEXT,
    NO_GPU,
    REFUSED,
    SERVER,
    SILENT,
    STEP_SECONDS,
    UNSEEN,
    WHOLE,
    WORKER,
    Watch,
    card,
    process,
    serving,
    working,
)
from vllm_headroom.derive.life.progress import STALLED_SECONDS
from vllm_headroom.derive.life.states import TRANSITIONS, Symptom, find_next_state
from vllm_headroom.model import EnginePage, Failure
from vllm_headroom.vocabulary import EngineState, Role


@pytest.mark.parametrize("page_failure", [REFUSED, SILENT, LOGIN])
def test_no_page_and_no_process_is_down(page_failure: Failure) -> None:
    assert Watch(processes=(), gpus=(card(0.5),)).state_of(page_failure) is EngineState.DOWN
    assert serving().state_of(page_failure, processes=(), gpus=(card(0.5),)) is EngineState.DOWN


def test_a_stranger_on_the_gpu_is_no_engine_where_its_processes_would_show() -> None:
    assert Watch(processes=(), gpus=(card(60),)).state_of(REFUSED) is EngineState.DOWN


@pytest.mark.parametrize("page_failure", [REFUSED, SILENT])
def test_processes_without_a_page_yet_are_starting_for_as_long_as_that_takes(page_failure: Failure) -> None:
    watch = Watch()

    assert watch.state_of(page_failure) is EngineState.STARTING
    assert watch.state_of(page_failure, after_seconds=1800) is EngineState.STARTING
    assert watch.state_of(working(0, running=0.0)) is EngineState.SERVING


def test_a_page_that_answers_is_serving_before_the_first_request() -> None:
    assert Watch().state_of(working(0, running=0.0)) is EngineState.SERVING
    assert Watch().state_of(page(engine(model_name=""))) is EngineState.SERVING, "V0 tells its settings only"


def test_a_page_without_an_engine_is_serving_only_where_processes_vouch_for_it() -> None:
    assert Watch().state_of(page()) is EngineState.SERVING
    assert Watch(processes=()).state_of(page()) is EngineState.UNKNOWN


@pytest.mark.parametrize(
    "engine_page", [working(20, started=None), page(engine(model_name="", started_at_seconds=1.0))]
)
def test_a_page_that_no_longer_tells_of_the_engine_says_nothing_of_it(engine_page: EnginePage) -> None:
    watch = Watch()
    assert watch.state_of(engine_page) is EngineState.SERVING

    assert watch.state_of(page()) is EngineState.UNKNOWN
    assert watch.state_of(engine_page) is EngineState.SERVING


def test_a_page_that_says_it_sleeps_is_asleep_whatever_waits() -> None:
    watch = serving()
    asleep = working(20, running=0.0, waiting=3.0, awake=False)

    assert watch.state_of(asleep) is EngineState.ASLEEP
    assert watch.look(asleep, after_seconds=3600).state is EngineState.ASLEEP
    assert watch.look(asleep).progress_age_seconds is None
    assert watch.state_of(working(20, running=0.0, awake=True)) is EngineState.SERVING


def test_what_waited_while_it_slept_has_its_time_at_the_wake() -> None:
    watch = serving()
    watch.look(working(20, running=3.0, awake=True))
    watch.look(working(20, running=3.0, awake=False), after_seconds=3600)
    woken = working(20, running=3.0, awake=True)

    assert watch.state_of(woken) is EngineState.SERVING
    assert watch.state_of(woken, after_seconds=STALLED_SECONDS - 1) is EngineState.SERVING
    assert watch.state_of(woken, after_seconds=1) is EngineState.STALLED


def test_a_sleeper_whose_core_is_gone_is_stalled_while_its_page_answers() -> None:
    watch = serving()
    asleep = working(20, running=0.0, awake=False)

    assert watch.state_of(asleep, processes=WHOLE) is EngineState.ASLEEP
    assert watch.state_of(asleep, processes=(SERVER,)) is EngineState.STALLED


def test_one_sleeping_rank_puts_the_server_to_sleep() -> None:
    ranks = page(engine(name="0", running=1.0, awake=True), engine(name="1", running=0.0, awake=False))

    assert Watch().state_of(ranks) is EngineState.ASLEEP


@pytest.mark.parametrize(("running", "waiting"), [(4.0, 0.0), (0.0, 4.0)])
def test_work_that_does_not_move_for_a_minute_is_stalled(running: float, waiting: float) -> None:
    watch, frozen = serving(), working(21, running=running, waiting=waiting)
    watch.look(frozen)

    assert watch.state_of(frozen, after_seconds=STALLED_SECONDS - 1) is EngineState.SERVING
    assert watch.state_of(frozen, after_seconds=1) is EngineState.STALLED
    assert watch.state_of(working(22)) is EngineState.SERVING


def test_requests_that_pile_up_are_no_progress() -> None:
    watch = serving()
    watch.look(working(20, running=0.0, waiting=1.0))

    states = [watch.state_of(working(20, running=0.0, waiting=float(count)), after_seconds=20) for count in (2, 3, 4)]

    assert states == [EngineState.SERVING, EngineState.SERVING, EngineState.STALLED]


def test_an_idle_engine_never_stalls_and_its_first_request_has_its_time() -> None:
    watch, idle = serving(), working(20, running=0.0)

    assert watch.state_of(idle, after_seconds=3600) is EngineState.SERVING
    assert watch.state_of(idle, after_seconds=3600) is EngineState.SERVING
    assert watch.state_of(working(20, running=1.0), after_seconds=3600) is EngineState.SERVING


@pytest.mark.parametrize("moves", ["kv_used_ratio", "steps_total", "prompt_tokens_total"])
def test_a_prefill_of_eighteen_minutes_does_not_stall(moves: str) -> None:
    watch = serving()

    for chunk in range(18 * 60 // 30):
        chunked = working(20, running=1.0, **{moves: 0.01 * chunk})
        assert watch.state_of(chunked, after_seconds=30) is EngineState.SERVING


def test_one_rank_that_stands_still_stalls_the_server() -> None:
    def ranks(done: float) -> EnginePage:
        return page(
            engine(name="0", running=2.0, finished_total=done), engine(name="1", running=2.0, finished_total=7.0)
        )

    watch = Watch()

    assert [watch.state_of(ranks(done), after_seconds=30) for done in (1, 2)] == [EngineState.SERVING] * 2
    assert watch.state_of(ranks(3), after_seconds=30) is EngineState.STALLED


def test_a_core_that_is_gone_while_the_page_answers_is_stalled_at_once() -> None:
    watch, ranks = serving(), (SERVER, CORE, process(13, Role.ENGINE_CORE), WORKER)
    watch.look(working(21), processes=ranks)

    assert watch.state_of(working(21), processes=WHOLE) is EngineState.STALLED, "one of two ranks is dead"
    assert watch.state_of(working(21), processes=(SERVER,)) is EngineState.STALLED
    assert watch.state_of(REFUSED, processes=()) is EngineState.DOWN


def test_an_idle_server_with_a_dead_worker_is_stalled_too() -> None:
    assert serving().state_of(working(20, running=0.0), processes=(SERVER, CORE)) is EngineState.STALLED


@pytest.mark.parametrize("page_failure", [REFUSED, SILENT])
def test_a_page_that_stops_answering_while_its_processes_live_stalls_after_a_minute(page_failure: Failure) -> None:
    watch = serving()

    assert watch.state_of(page_failure) is EngineState.SERVING
    assert watch.state_of(page_failure, after_seconds=STALLED_SECONDS - 1) is EngineState.SERVING
    assert watch.state_of(page_failure, after_seconds=1) is EngineState.STALLED
    assert watch.state_of(working(30)) is EngineState.SERVING


def test_one_page_that_is_missed_after_a_time_in_which_nobody_looked_is_no_stall() -> None:
    watch = serving()

    for turn in range(3):
        assert watch.state_of(SILENT, after_seconds=300) is EngineState.SERVING
        assert watch.state_of(working(40 + turn), after_seconds=300) is EngineState.SERVING


def test_one_of_two_api_servers_that_hangs_leaves_the_server_serving() -> None:
    watch = serving()
    turns = {watch.state_of(SILENT if turn % 2 else working(30 + turn), after_seconds=30) for turn in range(8)}

    assert turns == {EngineState.SERVING}


def test_a_core_that_hangs_behind_a_page_that_fails_now_and_then_is_stalled() -> None:
    watch = serving()
    turns = [watch.state_of(SILENT if turn % 2 else working(21), after_seconds=20) for turn in range(6)]

    assert turns[-1] is EngineState.STALLED


def test_a_page_that_cannot_be_read_tells_nothing() -> None:
    assert Watch().state_of(LOGIN) is EngineState.UNKNOWN
    watch = serving()
    assert watch.state_of(LOGIN) is EngineState.SERVING
    assert watch.state_of(LOGIN, after_seconds=STALLED_SECONDS) is EngineState.UNKNOWN


def test_unseen_processes_are_known_by_what_they_hold() -> None:
    watch = Watch(processes=UNSEEN, gpus=(card(0.5),))
    assert watch.state_of(REFUSED) is EngineState.DOWN
    assert watch.state_of(REFUSED, gpus=(card(12),)) is EngineState.STARTING
    assert watch.state_of(working(5), gpus=(card(70),)) is EngineState.SERVING
    assert watch.state_of(SILENT) is EngineState.SERVING
    assert watch.state_of(REFUSED, gpus=(card(34),)) is EngineState.DOWN, "it let go of more than half"


def test_unseen_processes_and_unseen_memory_leave_the_page() -> None:
    watch = Watch(processes=UNSEEN, gpus=NO_GPU)
    assert watch.state_of(SILENT) is EngineState.UNKNOWN
    assert watch.state_of(REFUSED) is EngineState.DOWN
    assert watch.state_of(working(5)) is EngineState.SERVING
    assert watch.state_of(SILENT) is EngineState.SERVING
    assert watch.state_of(SILENT, after_seconds=60) is EngineState.STALLED


def test_a_page_that_answers_where_no_process_shows_means_that_they_cannot_be_seen() -> None:
    watch = serving(processes=())

    assert watch.state_of(SILENT) is EngineState.SERVING, "its memory is still held"


def test_a_new_run_is_starting_though_the_last_one_had_served() -> None:
    watch = serving()

    assert watch.state_of(REFUSED, processes=NEXT) is EngineState.STARTING
    assert watch.state_of(REFUSED, after_seconds=1800) is EngineState.STARTING


def test_a_pid_that_was_used_again_is_another_process() -> None:
    again = tuple(
        replace(engine_process, started_at_seconds=engine_process.started_at_seconds + 60) for engine_process in WHOLE
    )

    assert serving().state_of(REFUSED, processes=again) is EngineState.STARTING


def test_the_table_leads_from_each_state_somewhere_by_each_sight(subtests: pytest.Subtests) -> None:
    for symptom in Symptom:
        for state in EngineState:
            with subtests.test(symptom=symptom, state=state):
                reasons = [row.why for row in TRANSITIONS if row.symptom is symptom and row.state in {None, state}]

                assert find_next_state(state, symptom) in EngineState
                assert all(reasons)


def test_work_of_a_new_run_does_not_stall_because_the_previous_run_had_the_same_counters() -> None:
    watch = serving()
    while watch.at < STALLED_SECONDS - STEP_SECONDS:
        assert watch.state_of(working(20)) is EngineState.SERVING

    new_run = working(20, started=BEGAN + 9000)
    states = [watch.state_of(new_run, processes=NEXT) for _ in range(int(STALLED_SECONDS / STEP_SECONDS) - 1)]

    assert set(states) == {EngineState.SERVING}
    assert watch.seen is not None
    assert watch.seen.engine_status is not None
    assert watch.seen.engine_status.restarts == 1
