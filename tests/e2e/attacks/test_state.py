"""The state survives the ways in which a daemon is ended."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.contract.recorded import FOLDER
from tests.fakes.engine_server import EngineServer, page
from tests.process import daemon
from vllm_headroom.daemon.state.file import NAME, read

RECORDED = (FOLDER / "vllm-0.32.0" / "load-waiting.prom").read_text()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_that_ends_it_saves_the_state_first(number: int, tmp_path: Path) -> None:
    with (
        EngineServer(page(RECORDED)) as engine,
        daemon(ENGINE_URL=engine.url, STATE_DIR=str(tmp_path), SAMPLE_INTERVAL_SECONDS="1") as running,
    ):
        running.sees(lambda page: page.value("source_up", source="engine") == 1, "the engine answers")
        (tmp_path / NAME).unlink(missing_ok=True)

        assert running.stop(number)[0] == 0

    assert read(tmp_path) is not None
