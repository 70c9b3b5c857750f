from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.nvml.library import GIB, FakeInstance, FakeNvml
from tests.fakes.proc_tree import HOST
from tests.unit.commands.doctor.looking import CORE, Vllm, examined, lines, proc
from vllm_headroom_tools.doctor.fixes import Status

pytestmark = pytest.mark.usefixtures("nvml")


def test_the_gpus_of_the_engines_processes_are_reported_as_such(nvml: FakeNvml, vllm: Vllm, tmp_path: Path) -> None:
    nvml.gpus[1].processes = {CORE: GIB}
    nvml.write()

    findings = examined(proc(tmp_path, vllm), ENGINE_URL=vllm.url)

    assert findings["nvml"].text == "NVML answers, driver 580.95.05"
    assert findings["gpus"].details == (
        "GPU 0 (GPU-a) NVIDIA H100 80GB HBM3",
        "GPU 1 (GPU-b) NVIDIA H100 80GB HBM3",
    )
    owned = findings["gpu_attribution"]
    assert (owned.state, owned.text) == (Status.OK, "1 of 2 attributed to the engine")
    assert owned.details == (
        "GPU 0 (GPU-a) not attributed to the engine",
        "GPU 1 (GPU-b) the engine's (process: one of its processes is on it)",
    )
    assert findings["processes"].text == "vLLM's are seen (1 api_server, 1 engine_core), in a container's PID namespace"


def test_two_gpus_without_the_engines_processes_are_missing_an_owner(vllm: Vllm, tmp_path: Path) -> None:
    findings = examined(proc(tmp_path), ENGINE_URL=vllm.url)

    owned, process_finding = findings["gpu_attribution"], findings["processes"]
    assert (owned.state, process_finding.state) == (Status.MISSING, Status.MISSING)
    assert "cannot tell which GPUs the engine uses" in owned.text
    assert "which is not shared with vLLM's container" in process_finding.text
    assert lines(owned) == [
        "shareProcessNamespace: true",
        'pid: "service:processes"',
        "HEADROOM_GPUS=0,1  # leave out those that the engine does not use",
    ]
    assert "headroom_leak_bytes_*" in owned.absent


def test_while_the_engine_is_down_its_gpus_are_not_known_rather_than_missing(tmp_path: Path) -> None:
    findings = examined(proc(tmp_path), ENGINE_URL="http://127.0.0.1:1")

    assert findings["gpu_attribution"].state is Status.UNKNOWN
    assert findings["processes"].state is Status.UNKNOWN


def test_an_old_driver_in_a_container_leaves_the_gpus_to_be_named(nvml: FakeNvml, vllm: Vllm, tmp_path: Path) -> None:
    nvml.driver = "530.30.02"
    nvml.gpus[0].processes = {CORE: GIB}
    nvml.write()

    check = examined(proc(tmp_path, vllm), ENGINE_URL=vllm.url)["gpu_attribution"]

    assert check.state is Status.MISSING
    assert "cannot be matched with them in a container" in check.text
    assert lines(check)[-1].startswith("HEADROOM_GPUS=0,1 ")


def test_an_engine_on_gpus_that_are_not_visible_is_missing_them(vllm: Vllm, tmp_path: Path) -> None:
    check = examined(proc(tmp_path, vllm, namespace=HOST), ENGINE_URL=vllm.url)["gpu_attribution"]

    assert check.state is Status.MISSING
    assert "none of the engine's processes is on a visible GPU" in check.text
    assert "runtimeClassName: nvidia" in lines(check)


def test_an_engine_whose_gpu_may_be_the_one_that_cannot_be_read_is_no_matter_of_the_driver(
    nvml: FakeNvml, vllm: Vllm, tmp_path: Path
) -> None:
    nvml.gpus[1].errors = {"all": 15}
    nvml.write()

    check = examined(proc(tmp_path, vllm, namespace=HOST), ENGINE_URL=vllm.url)["gpu_attribution"]

    assert check.state is Status.MISSING
    assert "they may be on one that cannot, see gpus" in check.text


def test_the_only_gpu_is_doubted_where_the_engine_is_seen_and_is_not_on_it(
    nvml: FakeNvml, vllm: Vllm, tmp_path: Path
) -> None:
    del nvml.gpus[1]
    nvml.write()
    path = proc(tmp_path, vllm, namespace=HOST)
    elsewhere = examined(path, ENGINE_URL=vllm.url)["gpu_attribution"]
    nvml.gpus[0].processes = {CORE: GIB}
    nvml.write()
    there = examined(path, ENGINE_URL=vllm.url)["gpu_attribution"]

    assert elsewhere.state is Status.UNKNOWN
    assert "none of the engine's processes is on it" in elsewhere.text
    assert there.state is Status.OK


def test_the_only_gpu_is_taken_where_processes_cannot_be_seen(nvml: FakeNvml, vllm: Vllm, tmp_path: Path) -> None:
    del nvml.gpus[1]
    nvml.write()

    check = examined(proc(tmp_path), ENGINE_URL=vllm.url)["gpu_attribution"]

    assert check.state is Status.OK
    assert check.details == ("GPU 0 (GPU-a) attributed to the engine (single: no other is visible)",)


@pytest.mark.parametrize(("gpus", "origin"), [("GPU-A,1", "(uuid: HEADROOM_GPUS names it)"), ("all", "(assumed: ")])
def test_named_gpus_are_reported_as_named(gpus: str, origin: str) -> None:
    check = examined(GPUS=gpus)["gpu_attribution"]

    assert (check.state, check.text) == (Status.OK, "2 of 2 attributed to the engine")
    assert all(origin in detail for detail in check.details)


def test_a_named_gpu_that_is_not_visible_is_missing() -> None:
    check = examined(GPUS="0,GPU-z")["gpu_attribution"]

    assert (check.state, check.text) == (Status.MISSING, "HEADROOM_GPUS names GPUs that are not visible: GPU-z")
    assert check.absent == (), "the other one is there"


def test_a_list_that_leaves_out_the_gpu_of_the_engines_processes_is_reported(
    nvml: FakeNvml, vllm: Vllm, tmp_path: Path
) -> None:
    nvml.gpus[1].used_bytes = 2 * GIB
    nvml.gpus[1].processes = {CORE: GIB}
    nvml.write()

    proc_path = proc(tmp_path, vllm)
    wrong, right = (examined(proc_path, ENGINE_URL=vllm.url, GPUS=gpus)["gpu_attribution"] for gpus in "01")

    assert (wrong.state, right.state) == (Status.MISSING, Status.OK)
    assert wrong.text == "HEADROOM_GPUS leaves out GPUs that the engine's processes are on: GPU 1 (GPU-b)"


def test_a_mig_instance_is_named_by_its_uuid(nvml: FakeNvml, vllm: Vllm, tmp_path: Path) -> None:
    nvml.gpus[0].mig = True
    nvml.gpus[0].instances = [FakeInstance(uuid=f"MIG-{letter}", gpu_instance=n) for n, letter in enumerate("xy")]
    nvml.write()

    check = examined(proc(tmp_path), ENGINE_URL=vllm.url)["gpu_attribution"]

    assert lines(check)[-1].startswith("HEADROOM_GPUS=MIG-x,MIG-y,1 ")
