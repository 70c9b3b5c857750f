import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fakes.nvml.library import FakeGpu, FakeNvml
from tests.fakes.nvml.reader import Clock, devices, failure, reasons, run, until
from tests.logs import capture_logs
from tests.process import eventually
from vllm_headroom.model import Failure, GpuReading, GpuReadings
from vllm_headroom.scrape.nvml.reader import MAX_STUCK_CALLS, Nvml
from vllm_headroom.vocabulary import Reason

FOR_EVER = 600.0
PROMPTLY_SECONDS = 20.0
SHORT_SECONDS = 0.2
CALL_TIMEOUT_SECONDS = 1.0
INIT = "nvmlInitWithFlags -"
MEMORY = "nvmlDeviceGetMemoryInfo_v2"


def hang(fake: FakeNvml, *indices: int, function: str = MEMORY) -> None:
    for index, gpu in enumerate(fake.gpus):
        gpu.hangs = {function: FOR_EVER} if index in indices else {}
    fake.write()


async def read_with_reasons(nvml: Nvml, *wanted: Reason | None) -> tuple[GpuReading, ...]:
    """Read until the GPUs have failed for these reasons: when the machine pauses, a healthy one is late too."""
    readings = await until(nvml, lambda read: isinstance(read, GpuReadings) and reasons(read.devices) == [*wanted])
    assert isinstance(readings, GpuReadings)
    return readings.devices


def test_a_hung_gpu_costs_only_itself_until_its_call_returns(fake: FakeNvml) -> None:
    async def steps(nvml: Nvml) -> None:
        await read_with_reasons(nvml, None, None, None)
        hang(fake, 0)
        with capture_logs() as lines:
            for _ in range(3):
                readings = await read_with_reasons(nvml, Reason.TIMEOUT, None, None)
                assert (readings[0].uuid, readings[0].memory) == ("GPU-0", None)
                assert readings[1].memory is not None
            hang(fake)
            await read_with_reasons(nvml, None, None, None)
        assert [line["event"] for line in lines if line["uuid"] == "GPU-0"] == ["GPU failed", "GPU answers again"]

    run(steps, call_timeout_seconds=CALL_TIMEOUT_SECONDS)

    assert fake.calls().count(INIT) == 1


def test_a_hung_gpu_leaves_time_for_the_others_when_the_reading_has_less_than_a_call_may_take(fake: FakeNvml) -> None:
    async def steps(nvml: Nvml) -> bool:
        hang(fake)
        await read_with_reasons(nvml, None, None, None)
        hang(fake, 0)
        began = time.monotonic()
        failure_reasons = reasons(await devices(nvml, timeout_seconds=2.0))
        assert time.monotonic() - began < PROMPTLY_SECONDS
        return failure_reasons == [Reason.TIMEOUT, None, None]

    eventually(
        lambda: run(steps, call_timeout_seconds=FOR_EVER), "only the hung one fails in the reading that finds it"
    )


def test_a_gpu_that_hangs_when_it_is_opened_is_listed_by_its_index(fake: FakeNvml) -> None:
    hang(fake, 1, function="nvmlDeviceGetHandleByIndex_v2")

    async def steps(nvml: Nvml) -> None:
        readings = await read_with_reasons(nvml, None, Reason.TIMEOUT, None)
        assert (readings[1].index, readings[1].uuid) == (1, "")

        hang(fake)
        healthy = await read_with_reasons(nvml, None, None, None)
        assert [reading.uuid for reading in healthy] == ["GPU-0", "GPU-1", "GPU-2"]

    run(steps, call_timeout_seconds=CALL_TIMEOUT_SECONDS)


def test_two_gpus_that_hang_cost_only_themselves_and_are_asked_once(fake: FakeNvml) -> None:
    async def steps(nvml: Nvml) -> None:
        await read_with_reasons(nvml, None, None, None)
        hang(fake, 0, 1)
        fake.forget_calls()
        for _ in range(2):
            await read_with_reasons(nvml, Reason.TIMEOUT, Reason.TIMEOUT, None)
            await nvml.sample_used(10)
        assert max(fake.calls().count(f"{MEMORY} GPU-{index}") for index in (0, 1)) == 1

        hang(fake, 0)
        await read_with_reasons(nvml, Reason.TIMEOUT, None, None)

    run(steps, call_timeout_seconds=CALL_TIMEOUT_SECONDS)


def test_when_as_many_calls_are_stuck_as_may_be_nvml_fails_as_a_whole_until_one_returns(fake: FakeNvml) -> None:
    fake.gpus = [FakeGpu(uuid=f"GPU-{index}") for index in range(MAX_STUCK_CALLS + 1)]
    fake.write()

    async def steps(nvml: Nvml) -> None:
        await devices(nvml)
        hang(fake, *range(MAX_STUCK_CALLS))
        await until(nvml, lambda read: isinstance(read, Failure) and read.reason is Reason.TIMEOUT)

        hang(fake, *range(1, MAX_STUCK_CALLS))
        await until(nvml, lambda read: isinstance(read, GpuReadings))

    run(steps, call_timeout_seconds=0.2)


def test_an_init_that_hangs_fails_everything_and_is_not_made_twice(fake: FakeNvml) -> None:
    fake.hangs = {"nvmlInitWithFlags": FOR_EVER}
    fake.write()

    async def steps(nvml: Nvml) -> None:
        for _ in range(3):
            assert (await failure(nvml, timeout_seconds=SHORT_SECONDS)).reason is Reason.TIMEOUT
            await nvml.sample_used(10)
        fake.hangs = {}
        fake.write()
        await read_with_reasons(nvml, None, None, None)

    run(steps)

    assert fake.calls().count(INIT) == 1


def test_an_init_that_hangs_after_one_that_failed_is_a_timeout(fake: FakeNvml) -> None:
    clock = Clock()

    async def steps(nvml: Nvml) -> None:
        fake.errors = {"nvmlInitWithFlags": 9}
        fake.write()
        assert (await failure(nvml)).reason is Reason.DRIVER_MISSING
        fake.hangs = {"nvmlInitWithFlags": FOR_EVER}
        fake.write()
        clock.seconds += 1
        for _ in range(2):
            assert (await failure(nvml, timeout_seconds=SHORT_SECONDS)).reason is Reason.TIMEOUT

    run(steps, monotonic=clock)


def test_nvml_is_not_shut_down_under_a_stuck_call(fake: FakeNvml) -> None:
    clock = Clock()

    async def steps(nvml: Nvml) -> None:
        await read_with_reasons(nvml, None, None, None)
        hang(fake, 0)
        fake.gpus[1].errors = {"all": 15}
        fake.write()
        for _ in range(2):
            await read_with_reasons(nvml, Reason.TIMEOUT, Reason.DEVICE_LOST, None)
            clock.seconds += 61
        assert "nvmlShutdown -" not in fake.calls()

        fake.gpus[1].errors = {}
        hang(fake)
        await read_with_reasons(nvml, None, None, None)
        assert "nvmlShutdown -" in fake.calls()

    run(steps, monotonic=clock, call_timeout_seconds=CALL_TIMEOUT_SECONDS)


def test_a_cancelled_reading_leaves_its_gpu_alone_until_the_call_returns(fake: FakeNvml) -> None:
    async def steps(nvml: Nvml) -> None:
        await devices(nvml)
        hang(fake, 0)
        fake.forget_calls()
        reading = asyncio.create_task(nvml.read(FOR_EVER))
        async with asyncio.timeout(PROMPTLY_SECONDS):
            while f"{MEMORY} GPU-0" not in fake.calls():  # noqa: ASYNC110 - what changes is a file
                await asyncio.sleep(0.01)
        reading.cancel()
        await asyncio.wait([reading])
        async with asyncio.timeout(PROMPTLY_SECONDS):
            assert reasons(await devices(nvml, FOR_EVER)) == [Reason.TIMEOUT, None, None]

    run(steps, call_timeout_seconds=FOR_EVER)

    assert "nvmlShutdown -" not in fake.calls()


@pytest.mark.parametrize(
    ("function", "timeout_seconds"), [("nvmlInitWithFlags", 2.0), (MEMORY, 10.0), ("nvmlShutdown", 10.0)]
)
def test_the_process_ends_promptly_while_a_call_hangs(tmp_path: Path, function: str, timeout_seconds: float) -> None:
    fake = FakeNvml(tmp_path)
    fake.hangs = {function: FOR_EVER}
    fake.write()
    script = (
        "import asyncio, time\n"
        "from vllm_headroom.scrape.nvml.reader import Nvml\n"
        "async def main():\n"
        "    nvml = Nvml(monotonic=time.monotonic)\n"
        f"    await nvml.read({timeout_seconds})\n"
        "    await nvml.close()\n"
        "asyncio.run(main())\n"
        "print('the loop has ended')\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **fake.environment()},
        capture_output=True,
        text=True,
        check=True,
        timeout=PROMPTLY_SECONDS,
    )

    assert process.stdout.splitlines()[-1] == "the loop has ended"
    assert f"{function} " in " ".join(fake.calls())
