from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.logs import capture_logs
from tests.samples import failure
from tests.unit.daemon.state.engine import (
    ALARM_STEPS,
    FixedClock,
    device,
    followed,
    free,
    keeper,
    make_snapshot,
    make_state,
    reading,
    recalled,
    states,
)
from vllm_headroom import catalog
from vllm_headroom.daemon.state.file import STATE, StateFile
from vllm_headroom.daemon.state.saved import DerivationStates
from vllm_headroom.daemon.state.store import StateKeeper
from vllm_headroom.derive.leak.facts import Certainty, Precedent, start_track
from vllm_headroom.derive.leak.leak import LeakMemory
from vllm_headroom.model import EngineReading, Failure, Gpu, Snapshot
from vllm_headroom.vocabulary import Source
from vllm_headroom.worker import Worker

LAST = make_snapshot(ALARM_STEPS)
NEXT = ALARM_STEPS + 10
NO_ENGINE = make_snapshot(NEXT, engines=failure(Source.ENGINE))


def outcome(folder: Path, *snapshots: Snapshot) -> tuple[dict[str, Any], list[str]]:
    return asyncio.run(recalled(folder, *snapshots))


def test_the_verdict_is_there_at_the_first_sample_after_a_restart(alarmed: DerivationStates, tmp_path: Path) -> None:
    async def saved() -> None:
        first_keeper = keeper(tmp_path, LAST)
        assert await first_keeper.recall(LAST) == {}
        await first_keeper.save(states(alarmed))

    asyncio.run(saved())
    recalled_states, events = outcome(tmp_path, make_snapshot(NEXT))
    ((_, samples),) = followed(DerivationStates(**recalled_states), [make_snapshot(NEXT)])

    assert {sample.labels[2]: sample.value for sample in samples if sample.metric is catalog.LEAK_STATE}["leaking"] == 1
    assert events == ["saved state taken up: "]


def test_the_state_waits_until_the_engine_and_its_gpus_are_seen(alarmed: DerivationStates, tmp_path: Path) -> None:
    STATE.write(tmp_path, make_state(alarmed, LAST))

    nameless = make_snapshot(NEXT, engines=(EngineReading(model_name="", engine="0"),))
    unopened = make_snapshot(NEXT, gpus=(device(NEXT, "GPU-z"), device(NEXT, "")))
    waiting = [NO_ENGINE, nameless, make_snapshot(NEXT, gpus=failure(Source.NVML)), unopened]
    assert outcome(tmp_path, *waiting) == ({}, [])

    recalled_states, _ = outcome(tmp_path, *waiting, make_snapshot(NEXT))
    assert recalled_states["leak"].gpus["GPU-a"].verdict is Certainty.LEAKING


@pytest.mark.parametrize(
    "now", [NO_ENGINE, make_snapshot(NEXT, gpus=failure(Source.NVML))], ids=["no-engine", "no-gpus"]
)
def test_a_state_that_waits_is_not_written_over(now: Snapshot, alarmed: DerivationStates, tmp_path: Path) -> None:
    STATE.write(tmp_path, make_state(alarmed, LAST))
    old_content = (tmp_path / STATE.name).read_bytes()

    async def down() -> None:
        subject = keeper(tmp_path, now)
        await subject.save(states(DerivationStates()))
        await subject.recall(now)
        await subject.save(states(DerivationStates()))

    asyncio.run(down())

    assert (tmp_path / STATE.name).read_bytes() == old_content


def test_nothing_is_saved_of_an_engine_that_was_never_seen(tmp_path: Path) -> None:
    async def down() -> None:
        subject = keeper(tmp_path, NO_ENGINE)
        await subject.recall(NO_ENGINE)
        await subject.save(states(DerivationStates()))

    asyncio.run(down())

    assert list(tmp_path.iterdir()) == []


def test_it_is_taken_up_once(alarmed: DerivationStates, tmp_path: Path) -> None:
    STATE.write(tmp_path, make_state(alarmed, LAST))

    async def twice() -> None:
        subject = keeper(tmp_path, make_snapshot(NEXT))
        assert await subject.recall(make_snapshot(NEXT))
        assert await subject.recall(make_snapshot(NEXT)) == {}

    asyncio.run(twice())


OTHERS: dict[str, tuple[tuple[EngineReading, ...] | Failure | None, tuple[Gpu, ...] | None, str]] = {
    "restarted": ((reading(5, started_at_seconds=1.8e9),), None, "restart"),
    "restarted-and-further": ((reading(10**6, started_at_seconds=1.8e9),), None, "restart"),
    "says-nothing-now": ((reading(NEXT, started_at_seconds=None),), None, "another engine"),
    "another-model": ((EngineReading(model_name="n", engine="0"),), None, "another model (m)"),
    "another-gpu": (None, (device(NEXT, "GPU-z"),), "other GPUs (GPU-a)"),
    "no-gpu": (None, (), "other GPUs"),
}


@pytest.mark.parametrize(("engines", "gpus", "reason"), OTHERS.values(), ids=OTHERS)
def test_anothers_past_is_set_aside(
    engines: tuple[EngineReading, ...] | None,
    gpus: tuple[Gpu, ...] | None,
    reason: str,
    alarmed: DerivationStates,
    tmp_path: Path,
) -> None:
    saved = make_state(alarmed, LAST)
    STATE.write(tmp_path, saved)

    recalled_states, events = outcome(
        tmp_path, make_snapshot(NEXT, engines=engines, gpus=gpus), make_snapshot(NEXT + 1)
    )

    assert recalled_states == {}
    (event,) = events
    assert reason in event
    assert [path.name for path in tmp_path.iterdir()] == [f"{STATE.name}.bad"]
    assert (tmp_path / f"{STATE.name}.bad").read_bytes() == STATE.encode(saved)


def test_what_the_run_before_held_while_it_was_well_is_taken_up(alarmed: DerivationStates, tmp_path: Path) -> None:
    """Of a GPU that levelled off; the other one was in an alarm, and so excuses nothing."""
    precedent = Precedent(run_id="1.000", base_bytes=1e9, growth_bytes=(2e9,) * 24, follows_load=False, room_bytes=4e9)
    well = replace(start_track(0.0), precedent=precedent)
    gpus = {"GPU-a": well, "GPU-b": replace(alarmed.leak.gpus["GPU-a"], precedent=precedent)}
    STATE.write(tmp_path, make_state(replace(alarmed, leak=LeakMemory(gpus=gpus)), LAST))
    restarted = make_snapshot(NEXT, engines=(reading(5, started_at_seconds=1.8e9),))

    recalled_states, events = outcome(tmp_path, restarted)

    assert "restart" in events[0]
    assert {uuid: track.precedent for uuid, track in recalled_states["leak"].gpus.items()} == {"GPU-a": precedent}
    assert recalled_states["leak"].gpus["GPU-a"].history.anchor is None


def uncounted(step: int, finished_total: float | None) -> Snapshot:
    return make_snapshot(step, engines=(reading(step, started_at_seconds=None, finished_total=finished_total),))


@pytest.mark.parametrize(
    ("total_before", "now", "gap_steps", "same"),
    [
        (9000.0, 9500.0, 10, True),
        (9000.0, 9000.0, 60, True),
        (9000.0, 8999.0, 10, False),
        (9000.0, 12000.0, 61, False),
        (None, 9000.0, 10, False),
        (9000.0, None, 10, False),
    ],
)
def test_without_a_start_time_a_counter_that_goes_on_vouches_for_a_short_gap(
    total_before: float | None,
    now: float | None,
    gap_steps: int,
    *,
    same: bool,
    alarmed: DerivationStates,
    tmp_path: Path,
) -> None:
    STATE.write(tmp_path, make_state(alarmed, uncounted(ALARM_STEPS, total_before)))

    recalled_states, events = outcome(tmp_path, uncounted(ALARM_STEPS + gap_steps, now))

    assert bool(recalled_states) == same
    assert ("set aside" in events[0]) != same


@pytest.mark.parametrize(
    ("age_seconds", "reason"), [(86_401.0, "it is 24 h old"), (-301.0, "from the future"), (86_399.0, ""), (-299.0, "")]
)
def test_a_file_that_is_stale_or_from_the_future_is_set_aside(
    age_seconds: float, reason: str, alarmed: DerivationStates, tmp_path: Path
) -> None:
    STATE.write(tmp_path, make_state(alarmed, LAST, saved_at_seconds=NO_ENGINE.time_seconds - age_seconds))

    _, events = outcome(tmp_path, NO_ENGINE)

    assert (tmp_path / STATE.name).exists() == (not reason)
    assert len(events) == bool(reason)
    assert reason in "".join(events)


@pytest.mark.parametrize("content", [b"", b"{}", b"\0" * 4096, b"half of a"])
def test_a_bad_file_is_set_aside_with_one_line_and_the_next_one_is_good(
    content: bytes, alarmed: DerivationStates, tmp_path: Path
) -> None:
    (tmp_path / STATE.name).write_bytes(content)
    (tmp_path / f"{STATE.name}.bad").write_text("an older one")

    async def live() -> None:
        subject = keeper(tmp_path, LAST)
        assert await subject.recall(LAST) == {}
        await subject.save(states(alarmed))

    with capture_logs() as lines:
        asyncio.run(live())

    assert [line["event"] for line in lines] == ["saved state set aside, the leak detector starts over"]
    assert (tmp_path / f"{STATE.name}.bad").read_bytes() == content
    assert STATE.read(tmp_path) == make_state(alarmed, LAST)


def blocked(folder: Path) -> None:
    (folder / f"{STATE.name}.new").mkdir()


def no_folder(folder: Path) -> None:
    folder.rmdir()
    folder.write_text("a file")


def occupied(folder: Path) -> None:
    (folder / STATE.name).mkdir()


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [(blocked, "Is a directory"), (no_folder, "Not a directory"), (occupied, "Is a directory")],
)
def test_a_folder_that_cannot_be_used_is_one_line_until_it_can(
    spoil: Any, problem: str, alarmed: DerivationStates, tmp_path: Path
) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    spoil(folder)

    async def live() -> None:
        subject = keeper(folder, LAST)
        for _ in range(3):
            assert await subject.recall(LAST) == {}
            await subject.save(states(alarmed))
        folder.rename(tmp_path / "spoiled")
        for _ in range(3):
            assert await subject.recall(LAST) == {}
            await subject.save(states(alarmed))

    with capture_logs() as lines:
        asyncio.run(live())

    assert [line["event"].partition(":")[0] for line in lines] == ["state is not kept", "state is kept again"]
    assert lines[0]["problem"] == problem
    assert STATE.read(folder) == make_state(alarmed, LAST)


def test_a_volume_that_hangs_costs_the_timeout_and_no_more(
    alarmed: DerivationStates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(StateFile, "write", lambda *_: answers.wait(30))

    async def live() -> None:
        subject = keeper(tmp_path, LAST)
        await subject.recall(LAST)
        for _ in range(3):
            await subject.save(states(alarmed), 0.05)

    with capture_logs() as lines:
        asyncio.run(live())
    answers.set()

    assert [line["problem"] for line in lines] == ["the file system does not answer within 0.05 s"]


def test_the_last_save_is_made_though_the_end_came_during_another(
    alarmed: DerivationStates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, has_begun, go_on = Worker.call, threading.Event(), threading.Event()

    async def call(worker: Worker[Any], function: Callable[[], Any], timeout_seconds: float) -> Any:
        def slowly() -> Any:
            has_begun.set()
            go_on.wait(30)
            return function()

        return await calls(worker, slowly, timeout_seconds + 30)

    monkeypatch.setattr(Worker, "call", call)

    async def live() -> None:
        subject = StateKeeper(folder=tmp_path, clock=FixedClock(LAST), version="0", lock=free())
        go_on.set()
        await subject.recall(LAST)
        has_begun.clear()
        go_on.clear()
        saving = asyncio.create_task(subject.save(states(DerivationStates())))
        assert await asyncio.to_thread(has_begun.wait, 30)
        saving.cancel()
        last_save = asyncio.create_task(subject.save(states(alarmed)))
        await asyncio.sleep(0)
        go_on.set()
        await last_save

    with capture_logs() as lines:
        asyncio.run(live())

    assert lines == []
    assert STATE.read(tmp_path) == make_state(alarmed, LAST)
