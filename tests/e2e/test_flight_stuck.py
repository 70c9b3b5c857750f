"""A volume that stops answering in the midst of an incident costs no sample, and the incident is written later."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.life import Start, becomes, last_look, settings
from tests.fakes.nvml.library import FakeNvml
from tests.process import daemon, eventually
from vllm_headroom.trace.incidents import incidents_in

SOURCE = Path(__file__).parents[1] / "fakes" / "stuck_volume.c"


@pytest.fixture
def library(tmp_path: Path) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler named cc: the volume cannot be made to hang")
    built = tmp_path / "stuck.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(built), str(SOURCE), "-ldl"], check=True)
    return built


def test_an_end_while_the_volume_hangs_is_set_aside_when_it_answers(
    start: Start, nvml: FakeNvml, port: int, tmp_path: Path, library: Path
) -> None:
    state, stuck, vllm = tmp_path / "state", tmp_path / "state.stuck", start()
    volume = {"LD_PRELOAD": str(library), "STUCK": str(state)}
    with daemon(**settings(port, nvml, STATE_DIR=str(state)), **volume) as running:
        becomes(running, "serving")
        eventually((state / "flight.jsonl").exists, "the record has begun")
        stuck.touch()
        eventually(lambda: "the file system does not answer" in running.log(), "it is told")
        vllm.end()
        vllm.hold(0)
        before = last_look(becomes(running, "down"))
        running.sees(lambda page: last_look(page) > before + 60, "the samples go on")
        assert not running.page().has("last_incident_timestamp_seconds")

        stuck.unlink()
        running.sees(lambda page: page.has("last_incident_timestamp_seconds"), "it is set aside")
        assert "flight record written again" in running.log()
        assert running.stop()[0] == 0
    assert len(incidents_in(state / "incidents")) == 1
