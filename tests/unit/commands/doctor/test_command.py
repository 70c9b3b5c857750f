from __future__ import annotations

from pathlib import Path

from tests.fakes.nvml.library import GIB, FakeNvml
from tests.fakes.proc_tree import HOST
from tests.unit.commands.doctor.looking import CORE, Vllm, examined, proc
from vllm_headroom_tools.doctor.command import build_report
from vllm_headroom_tools.doctor.fixes import Status


def test_with_everything_there_is_nothing_is_missing(nvml: FakeNvml, vllm: Vllm, tmp_path: Path) -> None:
    nvml.gpus[0].processes = {CORE: GIB}
    nvml.write()
    settings = {
        "ENGINE_URL": vllm.url,
        "KV_BYTES_PER_TOKEN": "131072",
        "STATE_DIR": str(tmp_path / "state"),
        "TRACE_FILE": str(tmp_path / "trace.jsonl"),
    }

    findings = examined(proc(tmp_path, vllm), **settings)

    assert build_report(findings, "0.1.0").data["ok"] is True, findings
    unused = {"listen_port", "probe", "engine_log"}
    assert {name for name, finding in findings.items() if finding.state is not Status.OK} == unused
    assert not any(finding.fixes or finding.absent for finding in findings.values())


def test_an_install_that_was_given_no_more_than_an_address_misses_nothing(
    nvml: FakeNvml, vllm: Vllm, tmp_path: Path
) -> None:
    nvml.gpus[0].processes = {CORE: GIB}
    nvml.write()

    report = build_report(examined(proc(tmp_path, vllm), ENGINE_URL=vllm.url), "0.1.0")

    assert (report.data["ok"], report.status) == (True, 0), report


def test_whatever_is_missing_has_a_fix(nvml: FakeNvml, tmp_path: Path) -> None:
    nvml.errors["nvmlInitWithFlags"] = 12
    nvml.write()
    findings = examined(
        proc(tmp_path, namespace=HOST),
        ENGINE_URL="http://127.0.0.1:1",
        STATE_DIR="/proc/vllm-headroom",
        TRACE_FILE="/proc/vllm-headroom",
        LISTEN_HOST="192.0.2.1",
        LISTEN_PORT="9839",
    )

    missing = {name for name, finding in findings.items() if finding.state is Status.MISSING}
    assert missing == {
        "engine",
        "nvml",
        "listen_port",
        "state_dir",
        "trace_file",
    }
    assert all(findings[name].fixes for name in missing)


def test_the_names_are_a_closed_set() -> None:
    assert list(examined()) == [
        "engine",
        "engine_inputs",
        "reported_memory",
        "kv_bytes",
        "vllm_options",
        "vllm_faults",
        "nvml",
        "gpus",
        "gpu_attribution",
        "processes",
        "process_memory",
        "probe",
        "engine_log",
        "listen_port",
        "state_dir",
        "trace_file",
    ]
