"""Another engine's processes tell nothing of this one's run, and what runs on did not end."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unit.derive.life.watch import (
    BEGAN,
    NEXT,
    REFUSED,
    SERVER,
    SILENT,
    WHOLE,
    Watch,
    card,
    exits,
    serving,
    working,
)
from vllm_headroom.model import Failure
from vllm_headroom.vocabulary import EngineState, ExitReason


def loading() -> Watch:
    watch = Watch(gpus=(card(5),))
    assert watch.look(REFUSED).state is EngineState.STARTING
    return watch


def test_another_engine_that_was_taken_for_this_one_has_not_ended() -> None:
    life = loading().look(REFUSED, processes=NEXT, neighbours=(SERVER,))

    assert (life.state, life.restarts, exits(life)) == (EngineState.STARTING, 0, {})
    assert life.began_seconds == BEGAN + 9000


def test_nor_where_this_one_is_not_there() -> None:
    nudged = replace(SERVER, started_at_seconds=BEGAN + 1)

    life = loading().look(REFUSED, processes=(), neighbours=(nudged,))

    assert (life.state, life.restarts, exits(life)) == (EngineState.DOWN, 0, {})


def test_one_that_died_while_it_loaded_has_ended_whoever_has_its_pid() -> None:
    recycled = replace(SERVER, started_at_seconds=BEGAN + 60)

    assert exits(loading().look(REFUSED, processes=(), neighbours=(recycled,))) == {ExitReason.GONE: 1}


def test_one_that_has_served_ends_though_its_server_lingers() -> None:
    life = serving().look(working(0, started=BEGAN + 50), processes=NEXT, neighbours=(SERVER,))

    assert (life.restarts, exits(life)) == (1, {ExitReason.REPLACED: 1})


@pytest.mark.parametrize("page_failure", [REFUSED, SILENT])
def test_engines_of_which_any_may_be_the_one_tell_nothing(page_failure: Failure) -> None:
    watch = Watch(processes=(), gpus=(replace(card(60), held_bytes=None),))

    assert watch.look(page_failure, ambiguous=2, neighbours=WHOLE).state is EngineState.UNKNOWN
    assert watch.look(page_failure, ambiguous=0).state is EngineState.DOWN
