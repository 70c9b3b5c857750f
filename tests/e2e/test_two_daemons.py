"""Two daemons are given one state directory: one of them keeps its state there, the other when that has ended."""

from __future__ import annotations

import errno
import fcntl
import signal
from pathlib import Path

import pytest

from tests.contract.recorded import FOLDER
from tests.fakes.engine_server import EngineServer, page
from tests.process import daemon, engine_answers, eventually
from vllm_headroom.daemon.state.file import STATE
from vllm_headroom.daemon.state.lock import FolderLock
from vllm_headroom.trace.flight import FLIGHT

RECORDED = (FOLDER / "vllm-0.32.0" / "load-waiting.prom").read_text()
OTHERS = "another daemon keeps its state here"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_second_keeps_nothing_until_the_first_has_ended(number: int, tmp_path: Path) -> None:
    state = tmp_path / "state"
    settings = {"STATE_DIR": str(state), "SAMPLE_INTERVAL_SECONDS": "0.2"}
    with EngineServer(page(RECORDED)) as engine, daemon(ENGINE_URL=engine.url, **settings) as first_daemon:
        first_daemon.sees(engine_answers, "the engine answers")
        eventually((state / FLIGHT).exists, "the first keeps a record")
        with daemon(ENGINE_URL=engine.url, **settings) as passing:
            passing.sees(engine_answers, "it exports all the same")
            eventually(lambda: OTHERS in passing.log(), "it is told")
            assert passing.stop()[0] == 0
        assert not (state / STATE.name).exists(), "it has kept nothing at its end"

        with daemon(ENGINE_URL=engine.url, **settings) as second:
            eventually(lambda: OTHERS in second.log(), "it is told")
            first_daemon.stop(number)
            eventually(lambda: "state is kept from now on" in second.log(), "it takes over")
            record_bytes = (state / FLIGHT).stat().st_size
            eventually(lambda: (state / FLIGHT).stat().st_size > record_bytes, "it goes on with the record")
            assert second.stop()[0] == 0
            assert second.log().count(OTHERS) == 1
        assert OTHERS not in first_daemon.log()
    assert STATE.read(state) is not None


def test_the_first_no_longer_has_a_folder_that_was_deleted_and_made_again(tmp_path: Path) -> None:
    state = tmp_path / "state"
    settings = {"STATE_DIR": str(state), "SAMPLE_INTERVAL_SECONDS": "0.2"}
    with EngineServer(page(RECORDED)) as engine, daemon(ENGINE_URL=engine.url, **settings) as first_daemon:
        first_daemon.sees(engine_answers, "the engine answers")
        eventually((state / FLIGHT).exists, "the first keeps a record")
        state.rename(tmp_path / "deleted")
        with daemon(ENGINE_URL=engine.url, **settings) as second:
            eventually(lambda: (state / FLIGHT).exists() and second.page().has("source_up"), "the second has begun")
            assert OTHERS not in second.log()

            assert first_daemon.stop()[0] == 0

            assert OTHERS in first_daemon.log()
            assert not (state / STATE.name).exists(), "it has kept nothing at its end"
            assert second.stop()[0] == 0
    assert STATE.read(state) is not None


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_where_there_are_no_locks_the_folder_is_taken_without(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(_descriptor: int, _operation: int) -> None:
        raise OSError(code, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuses)

    assert [FolderLock().take(tmp_path), FolderLock().take(tmp_path)] == [True, True]
