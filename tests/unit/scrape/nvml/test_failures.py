import os
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest

from tests.fakes.nvml.library import GIB, SONAME, FakeGpu, FakeNvml
from tests.fakes.nvml.reader import Clock, devices, failure, reasons, run
from vllm_headroom.scrape.nvml.reader import Nvml
from vllm_headroom.vocabulary import Reason

INIT = "nvmlInitWithFlags -"


@pytest.mark.parametrize(
    ("code", "reason", "advice"),
    [
        (12, Reason.LIBRARY_MISSING, "NVIDIA_DRIVER_CAPABILITIES=utility"),
        (9, Reason.DRIVER_MISSING, "load it"),
        (18, Reason.VERSION_MISMATCH, "restart the container"),
        (4, Reason.NO_PERMISSION, "/dev/nvidiactl"),
        (6, Reason.NO_DEVICES, "NVIDIA_VISIBLE_DEVICES"),
        (17, Reason.UNKNOWN, "(NVML error 17)"),
        (999, Reason.UNKNOWN, "(NVML error 999)"),
        (77, Reason.DRIVER_ERROR, "(NVML error 77)"),
    ],
)
def test_an_init_that_fails_says_why_and_what_to_do(fake: FakeNvml, code: int, reason: Reason, advice: str) -> None:
    fake.errors = {"nvmlInitWithFlags": code}
    fake.write()

    failed = run(failure)

    assert failed.reason is reason
    assert advice in failed.message


def test_no_gpu_at_all_is_a_failure_of_its_own(fake: FakeNvml) -> None:
    fake.gpus = []
    fake.write()

    assert run(failure).reason is Reason.NO_DEVICES


def test_a_library_that_cannot_be_loaded_is_missing(tmp_path: Path) -> None:
    (tmp_path / SONAME).write_text("not a library")
    script = (
        "import asyncio, time\n"
        "from vllm_headroom.scrape.nvml.reader import Nvml\n"
        "async def main():\n"
        "    nvml = Nvml(monotonic=time.monotonic)\n"
        "    await nvml.sample_used(1)\n"
        "    print((await nvml.read(10)).reason)\n"
        "    await nvml.close()\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    process = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )

    assert process.stdout == "library_missing\n"


def test_a_failed_driver_is_tried_again_after_growing_pauses_of_a_minute_at_most(fake: FakeNvml) -> None:
    clock = Clock()
    fake.errors = {"nvmlInitWithFlags": 9}
    fake.write()

    async def steps(nvml: Nvml) -> None:
        attempts = []
        for second in range(200):
            fake.forget_calls()
            assert (await failure(nvml)).reason is Reason.DRIVER_MISSING
            if INIT in fake.calls():
                attempts.append(second)
            clock.seconds += 1
        assert attempts == [0, 1, 3, 7, 15, 31, 63, 123, 183]

    run(steps, monotonic=clock)


def test_the_pauses_start_over_after_a_success(fake: FakeNvml) -> None:
    clock = Clock()

    async def steps(nvml: Nvml) -> None:
        for _ in range(3):
            fake.errors = {"all": 9}
            fake.write()
            assert (await failure(nvml)).reason is Reason.DRIVER_MISSING
            fake.errors = {}
            fake.write()
            clock.seconds += 1
            assert reasons(await devices(nvml)) == [None, None, None]

    run(steps, monotonic=clock)


@pytest.mark.parametrize(
    ("code", "reason"), [(1, Reason.DRIVER_ERROR), (9, Reason.DRIVER_MISSING), (18, Reason.VERSION_MISMATCH)]
)
def test_a_driver_that_fails_later_fails_everything_and_is_initialised_again(
    fake: FakeNvml, code: int, reason: Reason
) -> None:
    clock = Clock()

    async def steps(nvml: Nvml) -> None:
        await devices(nvml)
        fake.gpus[2].errors = {"nvmlDeviceGetMemoryInfo_v2": code}
        fake.write()
        await nvml.sample_used(10)
        assert (await failure(nvml)).reason is reason
        fake.gpus[2].errors = {}
        fake.write()
        fake.forget_calls()
        assert (await failure(nvml)).reason is reason
        assert fake.calls() == []

        clock.seconds += 1
        assert reasons(await devices(nvml)) == [None, None, None]
        assert fake.calls()[:3] == ["nvmlEventSetFree -", "nvmlShutdown -", INIT]

    run(steps, monotonic=clock)


def test_an_unknown_error_on_all_gpus_is_the_drivers(fake: FakeNvml) -> None:
    clock = Clock()

    async def steps(nvml: Nvml) -> None:
        await devices(nvml)
        fake.errors = {"nvmlDeviceGetMemoryInfo_v2": 999}
        fake.write()
        assert (await failure(nvml)).reason is Reason.UNKNOWN
        fake.forget_calls()
        for step_seconds, tried in ((0, False), (1, True), (1, False), (1, True)):
            clock.seconds += step_seconds
            assert (await failure(nvml)).reason is Reason.UNKNOWN
            assert (INIT in fake.calls()) is tried
            fake.forget_calls()

    run(steps, monotonic=clock)


def test_unified_memory_does_not_hide_an_unknown_error_on_everything_else(fake: FakeNvml) -> None:
    fake.gpus = [FakeGpu(uuid="GPU-0", total_bytes=None, errors={"nvmlDeviceGetComputeRunningProcesses_v3": 999})]
    fake.write()

    assert run(failure).reason is Reason.UNKNOWN


def test_a_name_that_is_not_utf_8_costs_the_name_alone(fake: FakeNvml, tmp_path: Path) -> None:
    fake.write()
    control = tmp_path / "nvml.txt"
    control.write_bytes(control.read_text().encode().replace(b"NVIDIA H100", b"\xff\xfe", 1))

    async def steps(nvml: Nvml) -> None:
        gpus = await devices(nvml)

        assert reasons(gpus) == [None, None, None]
        assert [gpu.name for gpu in gpus].count("") == 1
        assert all(gpu.memory is not None for gpu in gpus)

    run(steps)


def test_a_uuid_that_is_not_utf_8_costs_its_gpu_alone(fake: FakeNvml, tmp_path: Path) -> None:
    fake.write()
    control = tmp_path / "nvml.txt"
    control.write_bytes(control.read_bytes().replace(b"gpu GPU-1", b"gpu GPU-\xff"))

    async def steps(nvml: Nvml) -> None:
        gpus = await devices(nvml)

        assert reasons(gpus) == [None, Reason.DRIVER_ERROR, None]
        assert [gpu.uuid for gpu in gpus] == ["GPU-0", "", "GPU-2"]
        assert set(await nvml.sample_used(1.0)) == {"GPU-0", "GPU-2"}

    run(steps)


def test_what_no_one_foresaw_is_a_failure_and_no_exception(monkeypatch: pytest.MonkeyPatch, fake: FakeNvml) -> None:
    def surprise() -> str:
        raise KeyError

    async def steps(nvml: Nvml) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(pynvml, "nvmlDeviceGetCount", surprise)
            failed = await failure(nvml)
            assert failed.reason is Reason.DRIVER_ERROR
            assert "KeyError" in failed.message

        assert len(fake.gpus) == 3
        assert reasons(await devices(nvml)) == [None, None, None]

    run(steps)


TRANSIENT = {
    "not supported": pynvml.NVML_ERROR_NOT_SUPPORTED,
    "no permission": pynvml.NVML_ERROR_NO_PERMISSION,
    "function not found": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
}


@pytest.mark.parametrize("code", TRANSIENT.values(), ids=TRANSIENT)
@pytest.mark.parametrize("answered_before", [True, False])
def test_one_error_on_memory_is_over_with_the_next_reading(code: int, answered_before: bool, fake: FakeNvml) -> None:  # noqa: FBT001
    async def steps(nvml: Nvml) -> None:
        if answered_before:
            await devices(nvml)
        fake.gpus[0].errors = {"nvmlDeviceGetMemoryInfo_v2": code}
        fake.write()
        memories = [gpu.memory is not None for gpu in await devices(nvml)]
        assert memories == [False, True, True]

        fake.gpus[0].errors = {}
        fake.write()
        assert all(gpu.memory is not None for gpu in await devices(nvml))

    run(steps)


def test_a_device_that_has_reported_a_fact_is_asked_for_it_again(fake: FakeNvml) -> None:
    async def steps(nvml: Nvml) -> None:
        for gpu in fake.gpus:
            gpu.utilization_percent = 40
        fake.write()
        await devices(nvml)
        fake.gpus[0].errors = {"nvmlDeviceGetUtilizationRates": pynvml.NVML_ERROR_NOT_SUPPORTED}
        fake.write()
        assert [gpu.utilization_ratio for gpu in await devices(nvml)] == [None, 0.4, 0.4]

        fake.gpus[0].errors = {}
        fake.write()
        assert [gpu.utilization_ratio for gpu in await devices(nvml)] == [0.4, 0.4, 0.4]

    run(steps)


def test_closing_shuts_nvml_down(fake: FakeNvml) -> None:
    fake.gpus[0].used_bytes = GIB
    run(devices)

    assert fake.calls()[-1] == "nvmlShutdown -"
