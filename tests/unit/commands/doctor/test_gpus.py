from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.fakes.nvml.library import GIB, FakeNvml
from tests.fakes.proc_tree import HOST
from tests.unit.commands.doctor.looking import examined, lines, proc
from vllm_headroom.model import Failure, GpuReading, GpuReadings, ProcessReadings
from vllm_headroom.vocabulary import REASONS, Reason, Source
from vllm_headroom_tools.doctor.fixes import Status, Survey
from vllm_headroom_tools.doctor.gpus import check_gpus, check_nvml

pytestmark = pytest.mark.usefixtures("nvml")


def test_a_lost_gpu_is_missing_and_named(nvml: FakeNvml) -> None:
    nvml.gpus[1].errors["all"] = 15
    nvml.write()

    check = examined()["gpus"]

    assert (check.state, check.text) == (Status.MISSING, "2 visible, of which 1 cannot be read")
    assert check.details[1].startswith("GPU 1 (UUID not known): the GPU is lost")
    assert lines(check) == ["dmesg --ctime | grep -e NVRM -e Xid -e amdgpu"]


def test_a_hung_gpu_is_missing_and_the_other_is_read(nvml: FakeNvml) -> None:
    nvml.gpus[0].hangs["nvmlDeviceGetMemoryInfo_v2"] = 600
    nvml.write()

    findings = examined()

    assert findings["nvml"].state is Status.OK
    assert findings["gpus"].text == "2 visible, of which 1 cannot be read"
    assert "the GPU does not answer" in findings["gpus"].details[0]


def test_a_gpu_that_tells_no_memory_is_missing_it(nvml: FakeNvml) -> None:
    nvml.gpus[0].total_bytes = None
    nvml.write()

    check = examined()["gpus"]

    assert check.state is Status.MISSING
    assert "NVML reports no memory for it" in check.details[0]
    assert check.absent == ("headroom_gpu_memory_* of GPU 0 (GPU-a)",)


def test_memory_of_a_process_that_no_longer_exists_is_named_with_what_to_do(nvml: FakeNvml, tmp_path: Path) -> None:
    nvml.gpus[1].used_bytes, nvml.gpus[1].processes = 9 * GIB, {4711: 8 * GIB}
    nvml.write()
    container = tmp_path / "container"
    container.mkdir()

    host_details, unseen = (
        examined(path)["gpus"].details for path in (proc(tmp_path, namespace=HOST), proc(container))
    )

    assert host_details[-1].startswith("GPU 1 (GPU-b): 8 GiB held by pid 4711, which no longer exists: the driver")
    assert len(unseen) == 2, "in a container it may only be out of sight"


@pytest.mark.parametrize(
    ("code", "words", "line"),
    [
        (9, "driver is not loaded", "modprobe nvidia"),
        (4, "may not use NVML", "runtimeClassName: nvidia"),
        (18, "not of the loaded driver's version", "HEADROOM_GPU_FATAL_GRACE_SECONDS=60"),
        (999, "NVML fails on every GPU", "HEADROOM_GPU_FATAL_GRACE_SECONDS=60"),
    ],
)
def test_a_driver_that_fails_is_missing_and_what_needs_it_unknown(
    nvml: FakeNvml, code: int, words: str, line: str
) -> None:
    nvml.errors["nvmlInitWithFlags"] = code
    nvml.write()

    findings = examined()

    assert findings["nvml"].state is Status.MISSING
    assert words in findings["nvml"].text
    assert line in lines(findings["nvml"])
    assert all(findings[name].state is Status.UNKNOWN for name in ("gpus", "gpu_attribution", "process_memory"))


@pytest.mark.parametrize("reason", REASONS[Source.NVML])
def test_every_reason_has_a_fix(reason: Reason) -> None:
    failure = Failure(source=Source.NVML, reason=reason, message="it failed")
    lost = GpuReadings(driver_version=None, devices=(GpuReading(index=0, uuid="", name="", failure=failure),))

    assert check_nvml(surveyed(failure)).fixes
    assert check_gpus(surveyed(lost)).fixes


def surveyed(readings: GpuReadings | Failure) -> Survey:
    nothing = ProcessReadings(engine=(), visible_pids=frozenset(), sees_host_pids=True)
    page = Failure(source=Source.ENGINE, reason=Reason.TIMEOUT, message="no page")
    url = httpx.URL("http://127.0.0.1:8000/metrics")
    return Survey(
        url=url, page=page, version=None, readings=readings, gpus=(), processes=nothing, daemon_waits_seconds=5.0
    )
