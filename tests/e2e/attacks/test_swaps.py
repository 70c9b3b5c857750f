"""What is swapped under the running daemon: its folder of state, its settings' file, the time of day."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.contract.recorded import FOLDER
from tests.fakes.engine_server import EngineServer, page
from tests.fakes.preload import preloadable
from tests.process import Daemon, Page, daemon, engine_answers, eventually
from vllm_headroom.daemon.state.file import STATE
from vllm_headroom.trace.flight import FLIGHT

RECORDED = (FOLDER / "vllm-0.32.0" / "load-waiting.prom").read_text()
CLOCK = Path(__file__).parents[2] / "fakes" / "stepped_clock.c"
YEAR_SECONDS = 365 * 86_400


def looked_at(page: Page) -> float:
    return page.value("source_last_success_timestamp_seconds", source="engine")


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_link_in_place_of_the_folder_of_state_is_not_followed(number: int, tmp_path: Path) -> None:
    state, other_folder = tmp_path / "state", tmp_path / "others"
    other_folder.mkdir()
    (other_folder / STATE.name).write_text("what somebody else keeps there")
    settings = {"STATE_DIR": str(state), "SAMPLE_INTERVAL_SECONDS": "1"}
    with EngineServer(page(RECORDED)) as engine, daemon(ENGINE_URL=engine.url, **settings) as running:
        running.sees(engine_answers, "the engine answers")
        eventually((state / FLIGHT).exists, "the record has begun")
        state.rename(tmp_path / "away")
        state.symlink_to(other_folder)
        looked_before = looked_at(running.page())
        running.sees(lambda page: looked_at(page) > looked_before + 1, "samples go on")
        eventually(lambda: "a link is in the place of the folder" in running.log(), "it is told")

        assert running.stop(number)[0] == 0
        assert "state is not kept" in running.log()

    assert [file.name for file in other_folder.iterdir()] == [STATE.name]
    assert (other_folder / STATE.name).read_text() == "what somebody else keeps there"


def test_a_link_that_was_set_as_the_folder_of_state_is_followed(tmp_path: Path) -> None:
    state, link = tmp_path / "state", tmp_path / "link"
    state.mkdir()
    link.symlink_to(state)
    with (
        EngineServer(page(RECORDED)) as engine,
        daemon(ENGINE_URL=engine.url, STATE_DIR=str(link), SAMPLE_INTERVAL_SECONDS="1") as running,
    ):
        running.sees(engine_answers, "the engine answers")
        eventually((state / FLIGHT).exists, "the record has begun")

        assert running.stop()[0] == 0

    assert STATE.read(state) is not None


def test_a_settings_file_that_is_replaced_midway_changes_nothing_even_by_sighup(tmp_path: Path) -> None:
    """A hang-up ends it with its state saved where it began to: whoever starts it again reads the new file."""
    file, state, other_folder = tmp_path / "config.yaml", tmp_path / "state", tmp_path / "others"
    with EngineServer(page(RECORDED)) as engine:
        settings_text = f"engine_url: {engine.url}\nsample_interval_seconds: 1\nstate_dir: "
        file.write_text(f"{settings_text}{state}\n")
        with daemon(CONFIG=str(file)) as running:
            running.sees(engine_answers, "the engine answers")
            file.write_text(f"{settings_text}{other_folder}\nlisten_port: [\n")
            looked_before = looked_at(running.page())
            running.sees(lambda page: looked_at(page) > looked_before + 1, "samples go on")

            assert running.stop(signal.SIGHUP)[0] == 0
            assert "Traceback" not in running.log()

    assert STATE.read(state) is not None
    assert not other_folder.exists()


@pytest.fixture
def clock(tmp_path: Path) -> Path:
    """A library that moves the time of day by the seconds in the file beside it, and no other clock."""
    return preloadable(CLOCK, tmp_path)


def step(clock: Path, seconds: int) -> None:
    unfinished = clock.with_name("unfinished")
    unfinished.write_text(str(seconds))
    unfinished.replace(clock.with_name("step"))


def goes_on(running: Daemon, engine: EngineServer) -> None:
    old_count = len(engine.requests)
    eventually(lambda: len(engine.requests) >= old_count + 3, "samples go on")
    seen_page = running.sees(engine_answers, "the engine answers")
    assert running.get("/healthz").status_code == 200
    assert 0 <= seen_page.value("sample_age_seconds") < 30
    assert seen_page.value("engine_state", state="serving") == 1
    assert seen_page.value("engine_restarts_total") == 0


def test_steps_of_the_time_of_day_cost_no_sample_and_no_state(clock: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    settings = {"STATE_DIR": str(state), "SAMPLE_INTERVAL_SECONDS": "1", "GPU_SAMPLE_INTERVAL_SECONDS": "0.5"}
    steps = {"LD_PRELOAD": str(clock), "STEPPED": str(clock.with_name("step"))}
    with EngineServer(page(RECORDED)) as engine, daemon(ENGINE_URL=engine.url, **settings, **steps) as running:
        began = looked_at(running.sees(engine_answers, "the engine answers"))
        goes_on(running, engine)
        for seconds in (10 * YEAR_SECONDS, -10 * YEAR_SECONDS, 3600, -3600, 0):
            step(clock, seconds)
            goes_on(running, engine)
            assert looked_at(running.page()) == pytest.approx(began + seconds, abs=1800), "its clock was set"

        assert running.stop()[0] == 0
        assert "Traceback" not in running.log()
        assert "derivation failed" not in running.log()

    assert STATE.read(state) is not None
