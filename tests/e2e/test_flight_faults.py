"""A volume that is full or stops answering in an incident costs no sample, and the incident is written later."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from tests.e2e.life import Start, becomes, last_look, settings
from tests.fakes.nvml.library import FakeNvml
from tests.fakes.preload import preloadable
from tests.process import daemon, eventually
from vllm_headroom.trace.flight import list_incidents
from vllm_headroom.vocabulary import EndCause
from vllm_headroom_tools.postmortem.report import read_postmortem
from vllm_headroom_tools.trace import read_trace

ENOUGH_BYTES = 16_384
SOURCE = Path(__file__).parents[1] / "fakes" / "stuck_volume.c"


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return preloadable(SOURCE, tmp_path)


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
        looked_before = last_look(becomes(running, "down"))
        running.sees(lambda page: last_look(page) > looked_before + 60, "the samples go on")
        assert not running.page().has("last_incident_timestamp_seconds")

        stuck.unlink()
        running.sees(lambda page: page.has("last_incident_timestamp_seconds"), "it is set aside")
        assert "flight record written again" in running.log()
        assert running.stop()[0] == 0
    assert len(list_incidents(state / "incidents")) == 1


def test_an_end_while_the_volume_is_full_is_set_aside_when_there_is_room(
    start: Start, nvml: FakeNvml, port: int, tmp_path: Path
) -> None:
    """The kernel refuses to make a file of the daemon's larger, after part of a line, as a full disk does."""
    state, vllm = tmp_path / "state", start()
    record = state / "flight.jsonl"
    with daemon(**settings(port, nvml, STATE_DIR=str(state))) as running:
        becomes(running, "serving")
        eventually(
            lambda: record.exists() and record.stat().st_size > ENOUGH_BYTES, "the record is larger than the log"
        )
        pid, (_, hard_limit) = running.process.pid, resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (record.stat().st_size + 10, hard_limit))
        eventually(lambda: "flight record not written" in running.log(), "it is told")
        vllm.end()
        vllm.hold(0)
        looked_before = last_look(becomes(running, "down"))
        running.sees(lambda page: last_look(page) > looked_before + 60, "the samples go on")
        assert recorded_seconds(record) < looked_before

        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard_limit, hard_limit))
        running.sees(lambda _: recorded_seconds(record) > looked_before, "the record goes on")
        running.sees(lambda page: page.has("last_incident_timestamp_seconds"), "it is set aside")
        assert running.stop()[0] == 0
    (incident,) = list_incidents(state / "incidents")
    assert [snapshot.time_seconds for snapshot in read_trace(str(incident))]


@pytest.mark.parametrize("step_seconds", [-7200.0, 7200.0])
def test_a_clock_that_is_set_before_the_end_leaves_the_incident_right(
    start: Start, nvml: FakeNvml, port: int, tmp_path: Path, step_seconds: float
) -> None:
    state, vllm, stepped = tmp_path / "state", start(), tmp_path / "stepped"
    with daemon(**settings(port, nvml, STATE_DIR=str(state), STEPPED=str(stepped))) as running:
        looked_before = last_look(becomes(running, "serving"))
        running.sees(lambda page: last_look(page) > looked_before + 60, "it is seen for a while")
        (tmp_path / "new").write_text(str(step_seconds))
        (tmp_path / "new").rename(stepped)
        running.sees(lambda page: abs(last_look(page) - looked_before - step_seconds) < 1800, "the clock is set")
        vllm.kill(vllm.core)
        running.sees(lambda page: page.has("last_incident_timestamp_seconds"), "it is set aside")
    (incident,) = list_incidents(state / "incidents")
    postmortem = read_postmortem(incident)

    assert postmortem.answer.cause is EndCause.CRASH
    assert postmortem.ending is not None
    assert postmortem.ending.observed_seconds >= (60 if step_seconds < 0 else 7200)
    assert abs(postmortem.ending.seconds - looked_before - step_seconds) < 1800


def recorded_seconds(record: Path) -> float:
    return [snapshot.time_seconds for snapshot in read_trace(str(record))][-1]
