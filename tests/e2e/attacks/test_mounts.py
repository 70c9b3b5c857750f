"""File systems that are not there, or cannot be written."""

from __future__ import annotations

import subprocess
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from tests.contract.recorded import FOLDER
from tests.e2e.life import HURRIED
from tests.fakes.engine_server import EngineServer, page
from tests.process import Daemon, daemon, engine_answers, eventually

RECORDED = (FOLDER / "vllm-0.32.0" / "load-waiting.prom").read_text()
MOUNTS = subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode == 0
pytestmark = pytest.mark.skipif(not MOUNTS, reason="unshare cannot make a mount namespace here")


def mounted(mount: str, engine: EngineServer, **settings: str) -> AbstractContextManager[Daemon]:
    """Run the daemon where `mount` has changed what is mounted, for it alone."""
    under = ("unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh")
    return daemon(under=under, ENGINE_URL=engine.url, SAMPLE_INTERVAL_SECONDS="1", **settings)


def is_told(running: Daemon, event: str) -> bool:
    return event in running.log()


def test_where_proc_is_not_mounted_the_engine_counts_as_not_seen() -> None:
    with (
        EngineServer(page(RECORDED)) as engine,
        mounted("mount -t tmpfs none /proc", engine) as running,
    ):
        seen_page = running.sees(engine_answers, "the engine answers")

        assert seen_page.value("source_up", source="process") == 0
        assert seen_page.value("source_failures_total", source="process", reason="unavailable") >= 1
        assert running.stop()[0] == 0
        assert "Traceback" not in running.log()


def test_a_volume_that_became_read_only_costs_what_is_kept_there_alone(tmp_path: Path) -> None:
    state = tmp_path / "state"
    files = {"STATE_DIR": str(state), "TRACE_FILE": str(state / "trace")}
    with EngineServer(page(RECORDED)) as engine:
        with daemon(ENGINE_URL=engine.url, SAMPLE_INTERVAL_SECONDS="1", **files) as running:
            running.sees(engine_answers, "the engine answers")
            assert running.stop()[0] == 0
        files_before = {file.name: file.read_bytes() for file in state.iterdir()}
        mount = f"mount --bind '{state}' '{state}' && mount -o remount,ro,bind '{state}'"
        with mounted(mount, engine, **HURRIED, **files) as running:
            running.sees(engine_answers, "the engine answers")
            for event in ("trace not written", "flight record not written", "state is not kept"):
                eventually(partial(is_told, running, event), event)
            request_count = len(engine.requests)
            eventually(lambda: len(engine.requests) >= request_count + 2, "samples go on")

            assert running.stop()[0] == 0
            assert "Traceback" not in running.log()

    assert {file.name: file.read_bytes() for file in state.iterdir()} == files_before
