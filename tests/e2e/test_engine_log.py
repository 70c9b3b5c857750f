"""The engine's log is followed by the real daemon: a start, a rotation and a death."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.life import Start, becomes, settings
from tests.engine_logs import DEATH, VLLM_0_19
from tests.fakes.nvml.library import FakeNvml
from tests.process import daemon
from vllm_headroom.trace.flight import list_incidents
from vllm_headroom.vocabulary import EndCause, Sureness
from vllm_headroom_tools.postmortem.report import read_postmortem


def test_the_incident_of_a_death_has_the_refused_allocation(
    start: Start, nvml: FakeNvml, port: int, tmp_path: Path
) -> None:
    state, log, vllm = tmp_path / "state", tmp_path / "vllm.log", start()
    log.write_text(VLLM_0_19)
    with daemon(**settings(port, nvml, STATE_DIR=str(state), ENGINE_LOG=str(log))) as running:
        page = becomes(running, "serving")
        assert page.value("source_up", source="log") == 1
        assert page.value("engine_startup_bytes", part="kv_cache") == round(37.28 * 2**30)
        log.rename(tmp_path / "vllm.log.1")
        log.write_text(DEATH)
        vllm.end()
        vllm.hold(0)
        running.sees(lambda page: page.has("last_incident_timestamp_seconds"), "it is set aside")
        page = becomes(running, "down")
        assert page.value("engine_exits_total", reason="out_of_memory") == 1
        assert page.value("engine_refused_bytes") == round(3.74 * 2**30)
        assert "3.74 GiB were refused on GPU 0" in running.get("/").text
    (incident,) = list_incidents(state / "incidents")
    answer = read_postmortem(incident).answer

    assert answer.sureness is Sureness.SURE
    assert answer.cause is EndCause.BURST
    assert any("3.74 GiB were refused on GPU 0" in evidence for evidence in answer.evidence)
