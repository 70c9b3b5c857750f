"""The real process is restarted: what the leak detector learned is there again, for the same engine alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.fakes.engine_server import EngineServer, page
from tests.fakes.nvml.library import FakeGpu, FakeNvml
from tests.process import Page, daemon
from tests.unit.daemon.state.engine import (
    ALARM_STEPS,
    REQUESTS_PER_STEP,
    after,
    count_held_bytes,
    make_snapshot,
    make_state,
)
from vllm_headroom.daemon.state.file import HISTORY, STATE
from vllm_headroom.expose.view import HistoryEvent, SavedHistory
from vllm_headroom.vocabulary import Level

FAST = {"SAMPLE_INTERVAL_SECONDS": "1", "GPU_SAMPLE_INTERVAL_SECONDS": "0.2"}
SET_ASIDE = "saved state set aside"
STARTED = 1_760_000_000.0


def metrics(started_at: float = STARTED, finished: int = ALARM_STEPS * REQUESTS_PER_STEP) -> str:
    return (
        f"process_start_time_seconds {started_at}\n"
        'vllm:num_requests_running{engine="0",model_name="m"} 20.0\n'
        'vllm:num_requests_waiting{engine="0",model_name="m"} 0.0\n'
        f'vllm:request_success_total{{engine="0",finished_reason="stop",model_name="m"}} {finished}.0\n'
    )


def is_in(page: Page) -> str | None:
    """Return the leak state on a page; None before there is one."""
    leak_states = [
        state
        for state in ("unknown", "warming_up", "unsettled", "stable", "growing", "leaking", "asleep")
        if page.has("leak_state", state=state) and page.value("leak_state", state=state) == 1
    ]
    return leak_states[0] if leak_states else None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the state of an engine that leaks, saved a moment ago."""
    memory = after(make_snapshot(step) for step in range(1, ALARM_STEPS + 1))
    STATE.write(tmp_path / "state", make_state(memory, make_snapshot(ALARM_STEPS), saved_at_seconds=time.time()))
    return tmp_path / "state"


@pytest.fixture
def nvml(tmp_path: Path) -> FakeNvml:
    return FakeNvml(tmp_path, [FakeGpu(uuid="GPU-a", used_bytes=count_held_bytes(ALARM_STEPS), processes={4242: None})])


@pytest.fixture
def engine() -> Iterator[EngineServer]:
    with EngineServer(page(metrics())) as server:
        yield server


def first_state(engine: EngineServer, nvml: FakeNvml, folder: Path, **variables: str) -> tuple[str | None, str, int]:
    """Return the first leak state that a new process shows, its log and its exit status."""
    settings = {"ENGINE_URL": engine.url, "STATE_DIR": str(folder), **FAST, **nvml.environment(), **variables}
    with daemon(**settings) as running:
        seen_page = running.sees(is_in, "a leak state")
        status, _ = running.stop()
        return is_in(seen_page), running.log(), status


def test_the_verdict_survives_restarts_of_the_sidecar(engine: EngineServer, nvml: FakeNvml, folder: Path) -> None:
    for _ in range(2):
        old_content = (folder / STATE.name).read_bytes()

        state, log, status = first_state(engine, nvml, folder)

        assert (state, status) == ("leaking", 0)
        assert log.count("saved state taken up") == 1
        assert SET_ASIDE not in log
        assert (folder / STATE.name).read_bytes() != old_content, "it was saved at the end"


def test_the_history_survives_a_restart_of_the_sidecar(engine: EngineServer, nvml: FakeNvml, folder: Path) -> None:
    event = HistoryEvent(seconds=time.time() - 60, level=Level.WARNING, text="GPU 0 ran low.")
    HISTORY.write(folder, SavedHistory(events=(event,)))

    with daemon(ENGINE_URL=engine.url, STATE_DIR=str(folder), **FAST, **nvml.environment()) as running:
        running.sees(is_in, "a leak state")
        events = running.get("/snapshot.json").json()["history"]["events"]

    assert events[0]["text"] == "GPU 0 ran low."


def test_an_engine_that_restarted_meanwhile_starts_afresh(engine: EngineServer, nvml: FakeNvml, folder: Path) -> None:
    engine.answer = page(metrics(started_at=STARTED + 9000, finished=10**6))

    state, log, status = first_state(engine, nvml, folder)

    assert (state, status) == ("warming_up", 0)
    assert log.count(SET_ASIDE) == 1
    assert (folder / f"{STATE.name}.bad").exists()
    assert first_state(engine, nvml, folder)[1].count("saved state taken up") == 1, "the new engine's own state is kept"


def test_another_engine_on_the_same_gpu_starts_afresh(engine: EngineServer, nvml: FakeNvml, folder: Path) -> None:
    engine.answer = page(metrics().replace('model_name="m"', 'model_name="n"'))

    state, log, _ = first_state(engine, nvml, folder)

    assert state == "warming_up"
    assert log.count(SET_ASIDE) == 1


def test_the_state_waits_for_an_engine_that_is_down(nvml: FakeNvml, folder: Path) -> None:
    old_content = (folder / STATE.name).read_bytes()
    with EngineServer(page("gone", status="503 Service Unavailable")) as engine:
        settings = {"ENGINE_URL": engine.url, "STATE_DIR": str(folder), **FAST, **nvml.environment()}
        with daemon(**settings) as running:
            running.sees(lambda page: page.value("source_up", source="engine") == 0, "the engine is down")
            running.stop()
        assert (folder / STATE.name).read_bytes() == old_content

        with daemon(**settings) as running:
            running.sees(lambda page: page.value("source_up", source="engine") == 0, "the engine is down")
            engine.answer = page(metrics())
            running.sees(lambda page: is_in(page) == "leaking", "the verdict is there with the engine")


def test_sigterm_ends_it_with_status_0_while_the_volume_hangs(
    engine: EngineServer, nvml: FakeNvml, folder: Path
) -> None:
    hanging = folder.parent / "hanging"
    hanging.mkdir()
    (hanging / "sitecustomize.py").write_text("import os, time\nos.fsync = lambda _: time.sleep(600)\n")

    state, log, status = first_state(engine, nvml, folder, PYTHONPATH=str(hanging))

    assert (state, status) == ("leaking", 0)
    assert log.count("state is not kept") == 1


def test_a_bad_file_costs_the_memory_and_nothing_else(engine: EngineServer, nvml: FakeNvml, folder: Path) -> None:
    (folder / STATE.name).write_bytes((folder / STATE.name).read_bytes()[:-100])

    state, log, status = first_state(engine, nvml, folder)

    assert (state, status) == ("warming_up", 0)
    assert log.count(SET_ASIDE) == 1
    assert STATE.read(folder) is not None


def test_the_demo_is_a_new_world_each_time(tmp_path: Path) -> None:
    demo = ("demo", "--scenario", "leak", "--speed", "500", "--sample-interval-seconds", "60")
    with daemon(*demo, STATE_DIR=str(tmp_path)) as running:
        running.sees(lambda page: is_in(page) in {"growing", "leaking"}, "the leak is seen")
        assert running.stop()[0] == 0
    saved = STATE.read(tmp_path)
    assert saved is not None
    assert any(track.verdict for track in saved.memory.leak.gpus.values())
    STATE.write(tmp_path, replace(saved, saved_at_seconds=time.time()))  # not from the future: its engine has to tell

    with daemon(*demo, STATE_DIR=str(tmp_path)) as running:
        first_page = running.sees(is_in, "a leak state")

        assert is_in(first_page) in {"unknown", "warming_up", "unsettled", "stable"}
        assert running.log().count(SET_ASIDE) == 1
        assert "before the engine's restart" in running.log()


def test_a_gpu_that_was_lost_before_the_sidecar_began_is_the_engines_still(
    engine: EngineServer, tmp_path: Path
) -> None:
    nvml = FakeNvml(tmp_path, [FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b")])
    settings = {"ENGINE_URL": engine.url, "STATE_DIR": str(tmp_path / "state"), **FAST, **nvml.environment()}
    with daemon(GPUS="GPU-b", **settings) as running:
        running.sees(lambda page: page.has("gpu_info", uuid="GPU-b", attribution="uuid"), "whose the GPU is")
        running.stop()
    nvml.gpus[1].errors = {"all": 15}
    nvml.write()

    with daemon(**settings) as running:
        seen_page = running.sees(
            lambda page: page.has("gpu_info", uuid="GPU-b", attribution="process"), "it is known again"
        )
        assert seen_page.value("gpu_up", uuid="GPU-b") == 0
