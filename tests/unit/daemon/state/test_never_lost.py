"""A saved state that could not be read is still there afterwards, and nothing is written through a link."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.logs import capture_logs
from tests.unit.daemon.state.engine import ALARM_STEPS, keeper, make_snapshot, make_state, recalled, states
from vllm_headroom.daemon.state.file import STATE, StateFile, UnusableState
from vllm_headroom.daemon.state.saved import DerivationStates

NEXT = make_snapshot(ALARM_STEPS + 10)
YEARS = 365.25 * 86400


def test_a_state_whose_first_read_failed_is_not_written_over_and_taken_up_later(
    alarmed: DerivationStates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    STATE.write(tmp_path, make_state(alarmed, make_snapshot(ALARM_STEPS)))
    old_content = (tmp_path / STATE.name).read_bytes()

    def broken(_file: StateFile[object], _folder: Path) -> None:
        raise OSError(5, "Input/output error")

    async def down_and_up() -> None:
        subject = keeper(tmp_path, NEXT)
        with monkeypatch.context() as patch, capture_logs() as lines:
            patch.setattr(StateFile, "read", broken)
            for _ in range(3):
                assert await subject.recall(NEXT) == {}
                await subject.save(states(DerivationStates()))
        assert [line["problem"] for line in lines] == ["Input/output error"]
        assert (tmp_path / STATE.name).read_bytes() == old_content

        assert "leak" in await subject.recall(NEXT)

    asyncio.run(down_and_up())


def test_a_damaged_state_that_cannot_be_set_aside_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / STATE.name).write_text("damaged")

    def broken(_file: StateFile[object], _folder: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(StateFile, "set_aside", broken)

    async def refused() -> None:
        subject = keeper(tmp_path, NEXT)
        with capture_logs() as lines:
            for _ in range(3):
                await subject.recall(NEXT)
                await subject.save(states(DerivationStates()))
        assert [line["problem"] for line in lines] == ["Permission denied"]

    asyncio.run(refused())

    assert (tmp_path / STATE.name).read_text() == "damaged"


@pytest.mark.parametrize("target", ["elsewhere", STATE.name], ids=["link", "loop"])
def test_a_link_in_its_place_is_set_aside_and_not_followed(
    alarmed: DerivationStates, tmp_path: Path, target: str
) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("somebody's")
    (folder / STATE.name).symlink_to(elsewhere if target == "elsewhere" else STATE.name)

    async def saved() -> None:
        subject = keeper(folder, NEXT)
        await subject.recall(NEXT)
        await subject.save(states(alarmed))

    asyncio.run(saved())

    assert elsewhere.read_text() == "somebody's"
    assert (folder / f"{STATE.name}.bad").is_symlink()
    assert not (folder / STATE.name).is_symlink()
    assert STATE.read(folder) is not None


def test_a_link_in_the_place_of_the_unfinished_file_is_not_written_through(
    alarmed: DerivationStates, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("somebody's")
    (tmp_path / f"{STATE.name}.new").symlink_to(elsewhere)

    STATE.write(tmp_path, make_state(alarmed, make_snapshot(ALARM_STEPS)))

    assert elsewhere.read_text() == "somebody's"
    assert STATE.read(tmp_path) is not None


def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / STATE.name)

    with pytest.raises(UnusableState, match="a pipe"):
        STATE.read(tmp_path)


@pytest.mark.parametrize("years", [-60, -1, 1, 60, 8000])
def test_a_clock_that_steps_by_years_does_no_harm(alarmed: DerivationStates, tmp_path: Path, years: int) -> None:
    STATE.write(
        tmp_path, make_state(alarmed, make_snapshot(ALARM_STEPS), saved_at_seconds=NEXT.time_seconds + years * YEARS)
    )

    recalled_states, events = asyncio.run(recalled(tmp_path, NEXT))

    assert recalled_states == {}
    assert [event.partition(",")[0] for event in events] == ["saved state set aside"]
