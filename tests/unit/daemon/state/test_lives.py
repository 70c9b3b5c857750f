"""How many runs came and went, over restarts of the daemon."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.logs import capture_logs
from tests.unit.daemon.state.engine import ALARM_STEPS, keeper, make_snapshot, make_state
from tests.unit.derive.life.watch import NEXT, REFUSED, Watch, card, serving
from vllm_headroom.daemon.state.file import RUNS, STATE
from vllm_headroom.daemon.state.saved import DerivationStates
from vllm_headroom.derive.life.engine import ENGINE_RUN, EngineMemory
from vllm_headroom.vocabulary import ExitReason


def crashed() -> EngineMemory:
    """Return the state after a death, a restart and another death."""
    watch = serving()
    watch.look(REFUSED, processes=(), gpus=(card(0.5),))
    watch.look(REFUSED, processes=NEXT)
    watch.look(REFUSED, processes=())
    return watch.state


def saved(folder: Path, **states: Any) -> None:
    async def save() -> None:
        subject = keeper(folder, make_snapshot(1))
        await subject.recall(make_snapshot(1))
        await subject.save({"leak": DerivationStates().leak, "baseline": DerivationStates().baseline, **states})

    asyncio.run(save())


def taken_up(folder: Path, step: int = 2) -> tuple[dict[str, Any], list[str]]:
    with capture_logs() as lines:
        result = asyncio.run(keeper(folder, make_snapshot(step)).recall(make_snapshot(step, engines=REFUSED)))
    return dict(result), [line["event"] for line in lines]


def test_they_come_back_exactly_and_at_once_while_the_engine_is_down(tmp_path: Path) -> None:
    earlier_memory = crashed()
    saved(tmp_path, **{ENGINE_RUN: earlier_memory})

    recalled_states, _ = taken_up(tmp_path)

    assert recalled_states == {ENGINE_RUN: EngineMemory(runs=earlier_memory.runs)}
    assert recalled_states[ENGINE_RUN].runs.exits == {ExitReason.GONE: 2}
    assert recalled_states[ENGINE_RUN].runs.restarts == 1
    assert earlier_memory.runs.exit_requests is None, "the newest run gave no page"


def test_the_requests_that_the_last_exit_cut_off_come_back(tmp_path: Path) -> None:
    watch = serving()
    watch.look(REFUSED, processes=(), gpus=(card(0.5),))
    saved(tmp_path, **{ENGINE_RUN: watch.state})

    assert taken_up(tmp_path)[0][ENGINE_RUN].runs.exit_requests == 4


def test_nothing_by_the_clock_of_the_last_process_comes_back(tmp_path: Path) -> None:
    saved(tmp_path, **{ENGINE_RUN: serving().state})
    watch = Watch()
    watch.state = taken_up(tmp_path)[0][ENGINE_RUN]
    watch.at = -1e6

    assert watch.look(REFUSED).progress_age_seconds is None


def test_they_go_on_when_what_the_detector_learned_is_of_another_run(alarmed: DerivationStates, tmp_path: Path) -> None:
    saved(tmp_path, **{ENGINE_RUN: crashed()})
    old = make_state(alarmed, make_snapshot(ALARM_STEPS))
    STATE.write(tmp_path, replace(old, identity=replace(old.identity, models=("another",))))

    recalled_states, _ = taken_up(tmp_path, ALARM_STEPS + 10)

    assert recalled_states[ENGINE_RUN].runs.restarts == 1
    assert (tmp_path / STATE.name).exists(), "it waits until an engine is seen"


def test_an_engine_that_was_never_seen_leaves_no_file(tmp_path: Path) -> None:
    saved(tmp_path, **{ENGINE_RUN: EngineMemory()})

    assert not (tmp_path / RUNS.name).exists()


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"format": 2, "checksum": ""}'])
def test_a_file_that_is_no_state_is_set_aside(content: bytes, tmp_path: Path) -> None:
    (tmp_path / RUNS.name).write_bytes(content)

    assert taken_up(tmp_path) == ({}, ["saved state set aside, the engine's restarts are counted from zero"])
    assert (tmp_path / f"{RUNS.name}.bad").read_bytes() == content


def test_a_change_of_one_byte_is_noticed(tmp_path: Path) -> None:
    written = RUNS.encode(crashed().runs)
    (tmp_path / RUNS.name).write_bytes(written.replace(b'"restarts":1', b'"restarts":2'))

    assert taken_up(tmp_path)[0] == {}
