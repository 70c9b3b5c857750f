"""The day's curves outlive the daemon."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tests.samples import gpu, snapshot
from tests.unit.daemon.state.engine import free
from vllm_headroom.clock import SystemClock
from vllm_headroom.daemon.state.file import HISTORY, _compute_checksum
from vllm_headroom.daemon.state.store import StateKeeper
from vllm_headroom.derive.leak.leak import LeakMemory
from vllm_headroom.derive.per_request import Baselines
from vllm_headroom.expose.view import History, HistoryEvent, SavedHistory
from vllm_headroom.vocabulary import Level


def past() -> History:
    history = History()
    history.step(snapshot(gpus=(gpu(),)), (), 3.0)
    return history


def keeper(folder: Path) -> StateKeeper:
    return StateKeeper(folder=folder, clock=SystemClock(), version="1", lock=free())


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    saved_history = replace(past().save(), events=(HistoryEvent(seconds=1.0, level=Level.ALARM, text="it leaks"),))

    HISTORY.write(tmp_path, saved_history)

    assert HISTORY.read(tmp_path) == saved_history
    assert (tmp_path / HISTORY.name).stat().st_size < 2**15


def test_the_keeper_hands_it_to_the_next_process(tmp_path: Path) -> None:
    async def live() -> dict[str, Any]:
        sample = snapshot()
        first_keeper = keeper(tmp_path)
        await first_keeper.recall(sample)
        await first_keeper.save({HISTORY.name: past().save(), "leak": LeakMemory(), "baseline": Baselines()})
        return dict(await keeper(tmp_path).recall(sample))

    saved_history = asyncio.run(live())[HISTORY.name]

    assert isinstance(saved_history, SavedHistory)
    history = History()
    history.restore(saved_history)
    assert history.read_curve("free GPU-a") == past().read_curve("free GPU-a")


def test_a_curve_that_is_none_sets_the_file_aside(tmp_path: Path) -> None:
    content = HISTORY.encode(past().save())
    document = {**json.loads(content), "curves": {"running": "!"}}
    del document["checksum"]
    (tmp_path / HISTORY.name).write_bytes(json.dumps({**document, "checksum": _compute_checksum(document)}).encode())

    assert HISTORY.name not in asyncio.run(keeper(tmp_path).recall(snapshot()))
    assert (tmp_path / f"{HISTORY.name}.bad").exists()


def test_a_damaged_file_is_set_aside_and_the_rest_is_taken_up(tmp_path: Path) -> None:
    (tmp_path / HISTORY.name).write_text("{")

    assert HISTORY.name not in asyncio.run(keeper(tmp_path).recall(snapshot()))
    assert (tmp_path / f"{HISTORY.name}.bad").exists()
