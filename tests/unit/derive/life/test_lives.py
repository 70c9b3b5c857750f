"""Where a run ends and another begins, and why."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.samples import engine, page
from tests.unit.derive.life.watch import (
    BEGAN,
    CORE,
    NEXT,
    REFUSED,
    SERVER,
    SILENT,
    UNSEEN,
    WHOLE,
    Watch,
    card,
    exits,
    serving,
    working,
)
from vllm_headroom.derive.life.engine import EngineMemory
from vllm_headroom.derive.life.states import EngineRuns
from vllm_headroom.model import EngineProcess, Failure, HostMemory
from vllm_headroom.vocabulary import EngineState, ExitReason
from vllm_headroom_tools.trace import NO_PID


def test_an_end_counts_for_90_minutes_and_one_that_is_dated_ahead_does_not() -> None:
    """The clock was set back after an end that is dated ahead."""
    watch = Watch()
    ends = (watch.at - 5401.0, watch.at - 5399.0, watch.at, watch.at + 1.0)
    watch.state = EngineMemory(runs=EngineRuns(ends_seconds=tuple(BEGAN + seconds for seconds in ends)))

    assert watch.look(working(10), after_seconds=0.0).recent_exits == 2


def test_the_reasons_that_can_be_known_are_counted_from_zero() -> None:
    life = Watch().look(REFUSED)

    assert life.exits == tuple((reason, 0) for reason in ExitReason)
    assert life.restarts == 0


def test_a_first_run_is_no_restart() -> None:
    watch = Watch(processes=(), gpus=(card(0.5),))
    watch.look(REFUSED)
    watch.look(REFUSED, processes=WHOLE)

    assert watch.look(working(5), gpus=(card(70),)).restarts == 0


def test_a_death_is_counted_when_it_is_seen_and_the_restart_when_the_next_one_begins() -> None:
    watch = serving()

    assert exits(watch.look(REFUSED, processes=(), gpus=(card(0.5),))) == {ExitReason.GONE: 1}
    assert watch.look(REFUSED).restarts == 0
    assert watch.look(REFUSED, processes=NEXT).restarts == 1
    life = watch.look(working(0, started=BEGAN + 9000), gpus=(card(70),))
    assert (life.restarts, exits(life)) == (1, {ExitReason.GONE: 1})


def test_a_loop_of_crashes_while_loading_is_counted_though_no_page_was_ever_seen() -> None:
    watch = Watch(processes=())
    for attempt in range(3):
        watch.look(REFUSED, processes=tuple(replace(process, pid=process.pid + 100 * attempt) for process in WHOLE))

    assert watch.look(REFUSED, processes=()).restarts == 2
    life = watch.look(REFUSED)
    assert (exits(life), life.recent_exits) == ({ExitReason.GONE: 3}, 3)
    life = watch.look(REFUSED, after_seconds=90 * 60.0)
    assert (exits(life), life.recent_exits) == ({ExitReason.GONE: 3}, 0)


def test_a_run_that_came_within_one_gap_replaced_the_last_one() -> None:
    watch = serving()

    life = watch.look(working(0, running=0.0, started=BEGAN + 50), processes=NEXT)

    assert (life.restarts, exits(life)) == (1, {ExitReason.REPLACED: 1})
    assert life.began_seconds == BEGAN + 50


@pytest.mark.parametrize("page_failure", [REFUSED, SILENT])
def test_a_run_whose_successor_loads_at_the_next_sample_is_gone_with_its_requests(page_failure: Failure) -> None:
    """A kubelet restarts a container within a second: no sample shows the engine without a process."""
    watch = serving()

    life = watch.look(page_failure, processes=NEXT)

    assert (life.restarts, exits(life)) == (1, {ExitReason.GONE: 1})
    assert (life.state, life.exit_requests) == (EngineState.STARTING, 4)


def test_a_server_that_tells_no_start_is_known_again_by_its_count_and_its_processes() -> None:
    watch = Watch()
    watch.look(working(5, started=None))
    watch.look(working(9, started=None))

    assert watch.look(working(9, started=None), processes=(SERVER, CORE)).restarts == 0
    assert watch.look(working(8, started=None)).restarts == 0, "its processes are the same"
    assert watch.look(working(20, started=None), processes=NEXT).restarts == 1, "all its processes are others"


def test_where_no_process_shows_a_server_without_a_start_is_known_again_by_its_count() -> None:
    watch = Watch(processes=UNSEEN)
    watch.look(working(9, started=None))

    assert watch.look(working(4, started=None)).restarts == 1, "its count fell by more than half"
    watch.look(SILENT)
    assert watch.look(working(3, started=None)).restarts == 2, "its count fell while it was away"


@pytest.mark.parametrize("processes", [WHOLE, UNSEEN])
def test_two_servers_without_a_start_that_answer_in_turn_do_not_restart(
    processes: tuple[EngineProcess, ...] | Failure,
) -> None:
    watch = Watch(processes=processes)

    for turn in range(20):
        life = watch.look(working(turn + (1000 if turn % 2 else 900), started=None))

    assert (life.restarts, exits(life)) == (0, {})


def test_a_start_whose_core_comes_later_is_one_run_where_a_trace_tells_no_pids() -> None:
    server, core, worker = (
        replace(process, pid=NO_PID, started_at_seconds=BEGAN + 9.0 * place) for place, process in enumerate(WHOLE)
    )
    watch = Watch()
    watch.look(REFUSED, processes=(server,))
    watch.look(REFUSED, processes=(server, core))
    life = watch.look(REFUSED, processes=(server, core, worker))

    assert (life.restarts, exits(life)) == (0, {})
    assert watch.look(REFUSED, processes=(replace(server, started_at_seconds=BEGAN + 99.0), core)).restarts == 0
    assert watch.look(REFUSED, processes=(replace(server, started_at_seconds=BEGAN + 199.0),)).restarts == 1


def test_two_servers_that_answer_in_turn_are_one_run_and_a_later_one_is_another() -> None:
    watch = Watch()
    for done in range(100, 110):
        watch.look(working(done, started=BEGAN))
        watch.look(working(done - 9, started=BEGAN - 3))

    assert watch.look(working(120, started=BEGAN)).restarts == 0
    assert watch.look(working(121, started=BEGAN + 9)).restarts == 1


def test_a_page_that_was_away_and_tells_the_same_start_is_the_same_run() -> None:
    watch = serving()
    watch.look(SILENT, after_seconds=600)

    assert watch.look(working(40), after_seconds=600).restarts == 0


def test_unseen_it_ends_when_its_memory_is_let_go() -> None:
    watch = serving(processes=UNSEEN)

    assert exits(watch.look(REFUSED, gpus=(card(70),), after_seconds=600)) == {}
    assert exits(watch.look(REFUSED, gpus=(card(1),))) == {ExitReason.GONE: 1}
    assert watch.look(REFUSED, gpus=(card(10),)).restarts == 1


def test_unseen_it_has_not_ended_because_one_of_its_gpus_cannot_be_read() -> None:
    both = (card(35), card(35, uuid="GPU-b"))
    watch = serving(processes=UNSEEN, gpus=both)

    life = watch.look(SILENT, gpus=(both[0], replace(both[1], held_bytes=None)))

    assert (life.state, exits(life)) == (EngineState.SERVING, {})
    assert exits(watch.look(SILENT, gpus=(card(1), card(1, uuid="GPU-b")))) == {ExitReason.GONE: 1}


def test_unseen_a_sleeper_that_does_not_answer_has_not_ended() -> None:
    watch = serving(processes=UNSEEN)
    watch.look(working(20, running=0.0, awake=False), gpus=(card(1),))

    assert exits(watch.look(SILENT)) == {}
    assert watch.look(working(20, running=0.0, awake=True), gpus=(card(70),)).restarts == 0


def test_a_gpu_that_ran_full_since_it_was_ready_tells_an_out_of_memory() -> None:
    watch = serving()
    watch.look(working(30), gpus=(card(79.9),))

    assert exits(watch.look(REFUSED, processes=(), gpus=(card(0.5),))) == {ExitReason.OUT_OF_MEMORY: 1}


def test_the_peak_of_the_last_minute_tells_it_too() -> None:
    watch = serving()

    life = watch.look(REFUSED, processes=(), gpus=(card(0.5, peak_gib=79.9),))

    assert exits(life) == {ExitReason.OUT_OF_MEMORY: 1}


@pytest.mark.parametrize("first_gib", [79.9, 79.6])
def test_an_engine_that_leaves_little_from_the_start_did_not_run_out_of_memory(first_gib: float) -> None:
    watch = serving(gpus=(card(first_gib),))

    life = watch.look(REFUSED, processes=(), gpus=(card(0.5, peak_gib=first_gib + 0.05),))

    assert exits(life) == {ExitReason.GONE: 1}


def test_room_that_came_back_minutes_before_the_end_is_no_out_of_memory() -> None:
    watch = serving()
    watch.look(working(30), gpus=(card(79.9),))
    for done in range(31, 35):
        watch.look(working(done), gpus=(card(70),), after_seconds=30.0)

    assert exits(watch.look(REFUSED, processes=(), gpus=(card(0.5),))) == {ExitReason.GONE: 1}


def killed(kills: int) -> HostMemory:
    return HostMemory(oom_kills=kills)


def test_the_hosts_room_is_that_of_when_the_engine_became_ready_and_goes_with_its_run() -> None:
    full, free = (HostMemory(used_bytes=used, limit_bytes=100) for used in (99, 60))
    watch = serving(host=free)
    goes_on = watch.look(working(30), host=full)
    ended_status = watch.look(REFUSED, processes=(), host=free)

    assert (goes_on.first_host_room_bytes, ended_status.first_host_room_bytes) == (40, None)


def test_what_the_kernel_killed_is_reported_before_all_else() -> None:
    watch = serving(host=killed(3))
    watch.look(working(30), gpus=(card(79.9),), host=killed(3))

    life = watch.look(REFUSED, processes=(), gpus=(card(0.5),), host=killed(4))

    assert exits(life) == {ExitReason.OOM_KILLED: 1}


@pytest.mark.parametrize(("kills", "reason"), [(3, ExitReason.GONE), (4, ExitReason.OOM_KILLED)])
def test_kills_before_a_start_do_not_explain_why_it_never_served(kills: int, reason: ExitReason) -> None:
    watch = Watch(gpus=(card(1),), host=killed(3))
    watch.look(REFUSED)
    watch.look(REFUSED)

    assert exits(watch.look(REFUSED, processes=(), gpus=(card(0.5),), host=killed(kills))) == {reason: 1}


def test_a_core_that_was_killed_minutes_before_the_page_went_is_why_it_ended() -> None:
    watch = serving(host=killed(0))
    for _ in range(3):
        watch.look(working(30), processes=(SERVER,), host=killed(1))

    assert exits(watch.look(REFUSED, processes=(), host=killed(1))) == {ExitReason.OOM_KILLED: 1}


def test_a_helper_that_was_killed_long_before_is_not_why_it_ended() -> None:
    watch = serving(host=killed(0))
    watch.look(working(30), host=killed(1))

    assert exits(watch.look(REFUSED, processes=(), gpus=(card(0.5),), host=killed(1))) == {ExitReason.GONE: 1}


def test_kills_of_an_earlier_run_are_not_held_against_the_next() -> None:
    watch = serving(host=killed(0))
    watch.look(REFUSED, processes=(), gpus=(card(0.5),), host=killed(1))
    watch.look(working(0, started=BEGAN + 9000), processes=NEXT, gpus=(card(70),), host=killed(1))

    life = watch.look(REFUSED, processes=(), gpus=(card(0.5),), host=killed(1))

    assert exits(life) == {ExitReason.OOM_KILLED: 1, ExitReason.GONE: 1}


def test_where_kills_are_not_known_nothing_is_said_of_them() -> None:
    watch = serving(host=killed(1))

    assert exits(watch.look(REFUSED, processes=(), gpus=(card(0.5),), host=HostMemory())) == {ExitReason.GONE: 1}


def test_a_run_began_with_its_oldest_process_or_as_its_page_says() -> None:
    older = replace(SERVER, started_at_seconds=BEGAN - 3)

    assert Watch(processes=(older, CORE)).look(REFUSED).began_seconds == BEGAN - 3
    assert Watch(processes=UNSEEN).look(working(5)).began_seconds == BEGAN
    assert Watch(processes=UNSEEN).look(page(engine(running=1.0))).began_seconds is None


def test_a_run_that_ended_has_no_beginning() -> None:
    assert serving().look(REFUSED, processes=(), gpus=(card(0.5),)).began_seconds is None


def test_a_daemon_that_takes_up_the_runs_knows_its_engine_again() -> None:
    earlier_watch, later_watch = serving(), Watch()
    later_watch.state = EngineMemory(runs=earlier_watch.state.runs)
    nudged = tuple(replace(process, started_at_seconds=process.started_at_seconds + 1) for process in WHOLE)

    assert later_watch.look(REFUSED, processes=nudged).restarts == 0
    assert later_watch.look(working(30)).restarts == 0


def test_a_daemon_that_takes_up_the_runs_counts_what_happened_meanwhile() -> None:
    earlier_watch, later_watch = serving(), Watch()
    later_watch.state = EngineMemory(runs=earlier_watch.state.runs)

    life = later_watch.look(REFUSED, processes=NEXT)

    assert (life.restarts, exits(life)) == (1, {ExitReason.GONE: 1})
    assert not life.is_in_service
