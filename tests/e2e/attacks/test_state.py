"""The state survives the ways in which a daemon is ended, and a volume that answers late."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.contract.recorded import FOLDER
from tests.fakes.engine_server import EngineServer, page
from tests.fakes.preload import preloadable
from tests.process import daemon, engine_answers, eventually
from vllm_headroom.daemon.state.file import RUNS, STATE

VOLUME = Path(__file__).parents[2] / "fakes" / "stuck_volume.c"
RECORDED = (FOLDER / "vllm-0.32.0" / "load-waiting.prom").read_text()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_that_ends_it_saves_the_state_first(number: int, tmp_path: Path) -> None:
    with (
        EngineServer(page(RECORDED)) as engine,
        daemon(ENGINE_URL=engine.url, STATE_DIR=str(tmp_path), SAMPLE_INTERVAL_SECONDS="1") as running,
    ):
        running.sees(engine_answers, "the engine answers")
        (tmp_path / STATE.name).unlink(missing_ok=True)

        assert running.stop(number)[0] == 0

    assert STATE.read(tmp_path) is not None


def test_a_state_that_could_not_be_read_at_first_is_not_written_over_and_taken_up_later(tmp_path: Path) -> None:
    state, stuck = tmp_path / "state", tmp_path / "state.stuck"
    volume = {"LD_PRELOAD": str(preloadable(VOLUME, tmp_path)), "STUCK": str(state)}
    settings = {"STATE_DIR": str(state), "SAMPLE_INTERVAL_SECONDS": "1"}
    with EngineServer(page(RECORDED)) as engine:
        with daemon(ENGINE_URL=engine.url, **settings) as running:
            running.sees(engine_answers, "the engine answers")
            assert running.stop()[0] == 0
        old_content = (state / STATE.name).read_bytes()
        stuck.touch()
        with daemon(ENGINE_URL=engine.url, **settings, **volume) as running:
            running.sees(engine_answers, "the engine answers")
            eventually(lambda: "the file system does not answer" in running.log(), "it is told")
            assert (state / STATE.name).read_bytes() == old_content

            stuck.unlink()
            eventually(lambda: "saved state taken up" in running.log(), "it is read again")
            assert running.stop()[0] == 0


def test_a_state_that_cannot_be_set_aside_costs_nothing_but_itself(tmp_path: Path) -> None:
    settings = {"STATE_DIR": str(tmp_path), "SAMPLE_INTERVAL_SECONDS": "0.2"}
    with EngineServer(page(RECORDED)) as engine:
        with daemon(ENGINE_URL=engine.url, **settings) as running:
            running.sees(engine_answers, "the engine answers")
            assert running.stop()[0] == 0
        saved = STATE.read(tmp_path)
        assert saved is not None
        STATE.write(tmp_path, replace(saved, identity=replace(saved.identity, models=("another",))))
        in_the_way = tmp_path / f"{STATE.name}.bad"
        in_the_way.mkdir()
        with daemon(ENGINE_URL=engine.url, **settings) as running:
            running.sees(lambda page: page.value("engine_restarts_total") == 0, "the lives are taken up")
            eventually(lambda: "state is not kept" in running.log(), "it is told")
            engine.answer = page(re.sub(r"(\nprocess_start_time_seconds) .*", r"\1 4e9", RECORDED))
            running.sees(lambda page: page.value("engine_restarts_total") == 1, "another life")
            old_count = len(engine.requests)
            running.sees(lambda _: len(engine.requests) >= old_count + 3, "three more looks")
            assert running.page().value("engine_restarts_total") == 1
            assert (running.log().count("state is not kept"), running.log().count("kept again")) == (1, 0)

            in_the_way.rmdir()
            eventually(lambda: "saved state set aside" in running.log(), "it is set aside as soon as it can be")
            assert running.stop()[0] == 0
    restarted = RUNS.read(tmp_path)
    assert restarted is not None
    assert restarted.restarts == 1
