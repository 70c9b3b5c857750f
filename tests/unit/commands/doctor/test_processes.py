from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.nvml.library import GIB, FakeNvml
from tests.fakes.proc_tree import HOST, ProcTree
from tests.unit.commands.doctor.looking import CONTAINER, CORE, Vllm, examined, lines, proc
from vllm_headroom.scrape.proc.reader import HIDDEN
from vllm_headroom_tools.doctor.fixes import Status

pytestmark = pytest.mark.usefixtures("nvml")


@pytest.mark.parametrize(
    ("namespace", "driver", "state", "words"),
    [
        (CONTAINER, "530.30.02", Status.MISSING, "the host's pids"),
        (CONTAINER, "535.104.12", Status.MISSING, "the host's pids"),
        (CONTAINER, "535.113.01", Status.MISSING, "another process's memory"),
        (CONTAINER, "550.54.14", Status.MISSING, "another process's memory"),
        (CONTAINER, "560.35.03", Status.MISSING, "another process's memory"),
        (CONTAINER, "565.57.01", Status.OK, "reports each process's own memory"),
        (CONTAINER, "580.95.05", Status.OK, "reports each process's own memory"),
        (CONTAINER, None, Status.UNKNOWN, "does not report its version"),
        (HOST, "530.30.02", Status.OK, "reports each process's own memory"),
        (HOST, "550.54.14", Status.OK, "reports each process's own memory"),
        (HOST, None, Status.OK, "reports each process's own memory"),
    ],
)
def test_the_memory_of_a_process_is_trusted_where_driver_and_namespace_allow_it(
    *, nvml: FakeNvml, vllm: Vllm, tmp_path: Path, namespace: str, driver: str | None, state: Status, words: str
) -> None:
    nvml.driver = driver
    nvml.gpus[0].processes = {CORE: GIB}
    nvml.write()

    check = examined(proc(tmp_path, vllm, namespace=namespace), ENGINE_URL=vllm.url)["process_memory"]

    assert check.state is state
    assert words in check.text
    if state is Status.MISSING:
        assert lines(check) == ["# NVIDIA driver 565.57.01 or newer", "hostPID: true"]
        assert check.absent == ('headroom_gpu_memory_held_bytes{holder="engine"|"other"}',)


def test_on_the_host_no_namespace_needs_sharing(vllm: Vllm, tmp_path: Path) -> None:
    findings = examined(proc(tmp_path, namespace=HOST), ENGINE_URL=vllm.url)

    assert "it runs on another machine, or other users' processes are hidden" in findings["processes"].text
    assert not any("shareProcessNamespace" in str(finding.fixes) for finding in findings.values())


@pytest.mark.parametrize(
    ("function", "processes"), [("none", {CORE: None}), ("nvmlDeviceGetComputeRunningProcesses_v3", {})]
)
def test_memory_that_the_driver_does_not_tell_of_a_process_is_missing(
    nvml: FakeNvml, vllm: Vllm, tmp_path: Path, function: str, processes: dict[int, int | None]
) -> None:
    nvml.gpus[0].processes = processes
    nvml.gpus[0].errors[function] = 3
    nvml.write()

    check = examined(proc(tmp_path, vllm, namespace=HOST), ENGINE_URL=vllm.url)["process_memory"]

    assert check.state is Status.MISSING
    assert check.text == "the driver does not report the memory of each process on GPU 0 (GPU-a)"


def test_a_proc_that_is_not_there_is_missing(tmp_path: Path) -> None:
    findings = examined(tmp_path / "nothing")

    assert findings["processes"].state is Status.MISSING
    assert "cannot be read" in findings["processes"].text
    assert findings["processes"].fixes
    assert findings["process_memory"].state is Status.UNKNOWN


@pytest.mark.parametrize("namespace", [CONTAINER, HOST])
def test_a_proc_that_hides_the_engine_is_missing_whether_its_page_answers_or_not(
    nvml: FakeNvml, vllm: Vllm, tmp_path: Path, namespace: str
) -> None:
    ProcTree(tmp_path, namespace=namespace)

    for url in (vllm.url, "http://127.0.0.1:1"):
        findings = examined(tmp_path, ENGINE_URL=url)

        assert len(nvml.gpus) > 1
        assert findings["processes"].text == HIDDEN.message
        assert {"shareProcessNamespace: true", "ProtectProc=default"} <= set(lines(findings["processes"]))
        assert "shareProcessNamespace: true" in lines(findings["gpu_attribution"])
        assert {findings[name].state for name in ("processes", "gpu_attribution")} == {Status.MISSING}


def test_an_engine_elsewhere_is_not_hidden_by_a_proc_without_it(tmp_path: Path) -> None:
    ProcTree(tmp_path)

    check = examined(tmp_path, ENGINE_URL="http://192.0.2.1:1")["processes"]

    assert check.state is Status.UNKNOWN
    assert check.text.startswith("vLLM's are not among the ")


@pytest.mark.parametrize("ports", [(8123,), (8123, 8124)])
def test_engines_that_serve_other_ports_are_not_taken_for_the_one_that_is_asked(
    tmp_path: Path, ports: tuple[int, ...]
) -> None:
    tree = ProcTree(tmp_path)
    for port in ports:
        tree.add(port, 1, "python3", "/venv/bin/vllm", "serve", "m", "--port", str(port))

    check = examined(tmp_path, ENGINE_URL="http://127.0.0.1:9")["processes"]

    assert check.state is Status.UNKNOWN
    assert check.text.startswith("vLLM's are not among the ")


def test_several_engines_that_cannot_be_distinguished_are_reported_as_such(vllm: Vllm, tmp_path: Path) -> None:
    findings = examined(proc(tmp_path, vllm, servers=2), ENGINE_URL=vllm.url)

    assert {findings[name].state for name in ("processes", "gpu_attribution")} == {Status.MISSING}
    assert "engines' servers are visible" in findings["processes"].text
    assert "--port 8001  # another for each server" in lines(findings["processes"])


@pytest.mark.parametrize("has_nvml", [True, False])
def test_a_core_that_its_server_left_behind_is_named_whether_a_gpu_tells_of_it_or_none(
    nvml: FakeNvml, tmp_path: Path, *, has_nvml: bool
) -> None:
    nvml.errors = {} if has_nvml else {"nvmlInitWithFlags": 9}
    nvml.write()
    tree = ProcTree(tmp_path, namespace=CONTAINER)
    tree.add(1, 0, "/sbin/init")
    tree.add(CORE, 1, "VLLM::EngineCore", group=7)

    findings = examined(tmp_path)
    finding = findings["processes"]

    assert findings["nvml"].state is (Status.OK if has_nvml else Status.MISSING)

    orphan_detail = f"pid {CORE} is left behind by an engine that has ended: end it with kill {CORE}, or kill -9 {CORE}"
    assert orphan_detail in finding.details
