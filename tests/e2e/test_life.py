"""The real daemon beside processes that look like vLLM's, which are killed, stopped and slow to start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.life import Start, becomes, last_look, settings, state
from tests.e2e.test_flight_faults import SOURCE
from tests.e2e.test_whose import ends
from tests.fakes.engine_server import EngineServer, page
from tests.fakes.nvml.library import GIB, FakeNvml
from tests.fakes.preload import preloadable
from tests.fakes.working_vllm import text
from tests.process import Daemon, Page, daemon, eventually


def test_a_core_that_is_stopped_is_stalled_until_it_goes_on(start: Start, nvml: FakeNvml, port: int) -> None:
    vllm = start()
    with daemon(**settings(port, nvml)) as running:
        becomes(running, "serving")

        os.kill(vllm.core, signal.SIGSTOP)
        stalled = becomes(running, "stalled")
        assert stalled.value("source_up", source="engine") == 1
        assert stalled.value("engine_requests_running") == 2
        assert stalled.value("engine_progress_age_seconds") >= 60

        os.kill(vllm.core, signal.SIGCONT)
        becomes(running, "serving")
        assert running.page().value("engine_restarts_total") == 0


def test_a_server_that_is_stopped_is_stalled_until_it_goes_on(start: Start, nvml: FakeNvml, port: int) -> None:
    vllm = start()
    with daemon(**settings(port, nvml)) as running:
        becomes(running, "serving")

        os.kill(vllm.server, signal.SIGSTOP)
        assert becomes(running, "stalled").value("source_up", source="engine") == 0

        os.kill(vllm.server, signal.SIGCONT)
        becomes(running, "serving")
        assert running.page().value("engine_restarts_total") == 0


def test_a_killed_core_is_known_at_once_and_what_it_leaves_is_no_strangers(
    start: Start, nvml: FakeNvml, port: int
) -> None:
    def holders(page: Page) -> tuple[float, float]:
        held_bytes = [page.value("gpu_memory_held_bytes", holder=holder) for holder in ("engine", "other")]
        return held_bytes[0] / GIB, held_bytes[1] / GIB

    vllm = start()
    with daemon(**settings(port, nvml)) as running:
        becomes(running, "serving")
        vllm.kill(vllm.core)
        stalled = running.sees(
            lambda page: state(page) == "stalled" and not page.has("host_memory_bytes", process="worker"),
            "the core has gone, the page answers on",
        )
        assert stalled.value("source_up", source="engine") == 1
        assert holders(stalled) == (60, 0)

        vllm.kill(vllm.server)
        down = becomes(running, "down")
        assert down.value("engine_exits_total", reason="gone") == 1
        assert holders(down) == (60, 0)

        second_run = start("second", held_gib=9)
        again = running.sees(lambda page: state(page) == "serving" and holders(page)[0] == 69, "a second life")
        assert again.value("engine_restarts_total") == 1
        assert holders(again) == (69, 0)

        vllm.kill(vllm.worker)
        vllm.hold(0)
        alone = running.sees(lambda page: page.value("gpu_memory_used_bytes") == 9 * GIB, "the leftover has gone")
        assert holders(alone) == (9, 0)
        assert "another process" not in running.log()
        assert second_run.process.poll() is None


def test_a_slow_start_is_starting_however_long_and_no_leak(start: Start, nvml: FakeNvml, port: int) -> None:
    vllm = start(ready=False, held_gib=1)
    with daemon(**settings(port, nvml, SPEED="200", SAMPLE_INTERVAL_SECONDS="60")) as running:
        began = last_look(becomes(running, "starting"))

        for gib in range(2, 41):
            vllm.hold(gib)
            until = began + 45 * gib
            seen_page = running.sees(lambda page, until=until: last_look(page) > until, "the load goes on")  # type: ignore[misc]
            assert state(seen_page) == "starting"
            assert seen_page.value("leak_state", state="warming_up") == 1
        vllm.become_ready()

        becomes(running, "serving")
        assert "leak suspected" not in running.log()


def test_a_proc_that_does_not_answer_is_no_end_of_an_engine(
    start: Start, nvml: FakeNvml, port: int, tmp_path: Path
) -> None:
    library, stuck, vllm = preloadable(SOURCE, tmp_path), tmp_path / "stuck", start(ready=False, held_gib=1)
    late = {
        "LD_PRELOAD": str(library),
        "STUCK": f"/proc/{vllm.server}/",
        "STUCK_BY": str(stuck),
        "STATE_DIR": str(tmp_path / "state"),
    }
    states = set()

    def seen(running: Daemon, wanted: str) -> Page:
        def is_wanted(page: Page) -> bool:
            states.add(state(page))
            return state(page) == wanted

        return running.sees(is_wanted, f"the engine is {wanted}")

    with daemon(**settings(port, nvml), **late) as running:
        seen(running, "starting")
        states.clear()
        for _ in range(3):
            stuck.touch()
            seen(running, "unknown")
            stuck.unlink()
            seen(running, "starting")
        vllm.become_ready()
        served = seen(running, "serving")

        assert states == {"starting", "unknown", "serving"}
        assert (ends(served), served.value("engine_restarts_total")) == (0, 0)
        assert "source=process reason=timeout" in running.log()
        assert not served.has("last_incident_timestamp_seconds")

        vllm.end()
        vllm.hold(0)
        assert ends(seen(running, "down")) == 1


def test_runs_are_counted_over_restarts_of_the_daemon(start: Start, nvml: FakeNvml, port: int, tmp_path: Path) -> None:
    daemon_settings = settings(port, nvml, STATE_DIR=str(tmp_path / "state"))
    vllm = start()
    with daemon(**daemon_settings) as running:
        becomes(running, "serving")
        for pid in (vllm.server, vllm.core, vllm.worker):
            vllm.kill(pid)
        vllm.hold(0)
        becomes(running, "down")
        running.stop()

    second = start("second", ready=False, held_gib=5)
    with daemon(**daemon_settings) as running:
        loading = becomes(running, "starting")
        assert loading.value("engine_restarts_total") == 1
        assert loading.value("engine_exits_total", reason="gone") == 1
        running.stop()

    second.become_ready()
    with daemon(**daemon_settings) as running:
        assert becomes(running, "serving").value("engine_restarts_total") == 1
        assert time.time() - running.page().value("engine_start_timestamp_seconds") < 600


def test_a_daemon_that_sees_no_process_but_its_own_says_so(tmp_path: Path) -> None:
    alone = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine gives out no namespaces")
    log = tmp_path / "log"
    with EngineServer(page(text(steps=1, started=1.0))) as engine, log.open("wb") as stream:
        options = ["--engine-url", engine.url, "--listen-port", "0", "--listen-host", "127.0.0.1"]
        command = [*alone, sys.executable, "-m", "vllm_headroom", *options]
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
        try:
            eventually(lambda: "first sample published" in log.read_text(), "a first sample")
        finally:
            process.kill()
            process.wait(30)

    log_text = log.read_text()
    assert "source=process reason=unavailable" in log_text
    assert "shareProcessNamespace" in log_text
    assert 'event="engine is serving"' in log_text
