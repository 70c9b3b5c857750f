"""How long nothing has moved, and what is held meanwhile."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.samples import AN_ENGINE, engine, page
from tests.unit.derive.life.watch import REFUSED, SILENT, Watch, serving, working
from vllm_headroom.derive.life.progress import IDLE_SECONDS, STALLED_SECONDS
from vllm_headroom.model import EnginePage, Failure
from vllm_headroom.vocabulary import EngineState


def test_the_age_grows_until_something_moves() -> None:
    watch = serving()

    assert watch.look(working(20), after_seconds=7).progress_age_seconds == 7
    assert watch.look(working(20), after_seconds=8).progress_age_seconds == 15
    assert watch.look(working(21), after_seconds=9).progress_age_seconds == 0


def test_there_is_no_age_while_there_is_nothing_to_do_or_no_page() -> None:
    watch = serving()

    assert watch.look(working(20, running=0.0)).progress_age_seconds is None
    assert watch.look(page(engine(running=None))).progress_age_seconds is None
    assert watch.look(REFUSED).progress_age_seconds is None


def test_an_engine_that_counts_nothing_does_not_stand_still() -> None:
    watch = serving()
    silent = page(engine(running=3.0, generation_tokens_total=None, finished_total=None, kv_used_ratio=None))

    for _ in range(40):
        life = watch.look(silent)
    assert life.progress_age_seconds is None
    assert life.state is EngineState.SERVING


def test_the_age_is_that_of_the_rank_that_has_stood_still_longest() -> None:
    watch = Watch()

    def age(done: float, running: float) -> float | None:
        ranks = engine(running=1.0, finished_total=done), engine(name="1", running=running, finished_total=7.0)
        return watch.look(page(*ranks), after_seconds=10).progress_age_seconds

    assert [age(done, 1.0) for done in range(4)] == [0, 10, 20, 30]
    assert age(5, 0.0) == 0


@pytest.mark.parametrize("kv_used_ratio", [0.0, 0.4])
def test_what_an_idle_engine_still_holds_is_stranded_after_a_minute(kv_used_ratio: float) -> None:
    watch, idle = serving(), working(20, running=0.0, kv_used_ratio=kv_used_ratio)
    watch.look(idle)

    assert watch.look(idle, after_seconds=IDLE_SECONDS - 1).stranded_ratios == ()
    assert watch.look(idle, after_seconds=1).stranded_ratios == ((AN_ENGINE, kv_used_ratio),)
    assert watch.look(working(20, running=1.0, kv_used_ratio=kv_used_ratio)).stranded_ratios == ()


def test_under_load_the_lowest_of_the_last_counts_of_the_probe_is_stranded() -> None:
    watch = serving()

    def stranded(ratio: float | None) -> tuple[object, ...]:
        return watch.look(working(20, running=8.0, kv_used_ratio=0.7, kv_stranded_ratio=ratio)).stranded_ratios

    assert [stranded(ratio) for ratio in (0.2, 0.2, 0.2)] == [(), (), ()]
    assert [stranded(ratio) for ratio in (0.9, 0.3)] == [((AN_ENGINE, 0.2),)] * 2
    assert stranded(None) == ()


@pytest.mark.parametrize("page_fields", [{"kv_used_ratio": None}, {"running": None}])
def test_what_is_not_known_is_not_stranded(page_fields: dict[str, float | None]) -> None:
    unknown = working(20, **{"running": 0.0, **page_fields})  # type: ignore[arg-type]
    watch = serving()
    watch.look(unknown)

    assert watch.look(unknown, after_seconds=3600).stranded_ratios == ()


def test_a_request_that_waits_keeps_it_from_being_stranded() -> None:
    waiting = working(20, running=0.0, waiting=1.0)
    watch = serving()
    watch.look(waiting)

    assert watch.look(waiting, after_seconds=3600).stranded_ratios == ()


IDLE = working(20, running=0.0)


def test_an_idle_engine_that_owes_a_canary_its_answer_stalls_after_a_minute() -> None:
    watch = serving()
    asked_seconds = watch.at

    assert watch.look(IDLE, owed_since=asked_seconds, after_seconds=STALLED_SECONDS - 1).state is EngineState.SERVING
    stalled = watch.look(IDLE, owed_since=asked_seconds, after_seconds=1)
    assert (stalled.state, stalled.progress_age_seconds) == (EngineState.STALLED, STALLED_SECONDS)
    answered = watch.look(IDLE)
    assert (answered.state, answered.progress_age_seconds) == (EngineState.SERVING, None)


def test_a_canary_is_as_old_as_what_was_done_last() -> None:
    watch = serving()
    asked_seconds = watch.at
    watch.look(working(25), owed_since=asked_seconds, after_seconds=600)

    assert watch.look(gave_up(), owed_since=asked_seconds, after_seconds=7).progress_age_seconds == 7
    assert watch.look(working(27, running=0.0), owed_since=asked_seconds, after_seconds=7).progress_age_seconds == 0


def gave_up() -> EnginePage:
    """Return the page of an idle engine that has given up a request since it had finished 25."""
    (reading,) = working(25, running=0.0).engines
    return page(replace(reading, finished_total=26.0))


@pytest.mark.parametrize("page_failure", [REFUSED, SILENT])
def test_a_canary_says_nothing_of_an_engine_that_sleeps_or_has_no_page(page_failure: Failure) -> None:
    watch = serving()
    asleep = watch.look(working(20, running=0.0, awake=False), owed_since=watch.at, after_seconds=600)
    failed_status = watch.look(page_failure, owed_since=watch.at, after_seconds=5)

    assert (asleep.state, asleep.progress_age_seconds) == (EngineState.ASLEEP, None)
    assert failed_status.progress_age_seconds is None
