import asyncio

from tests.fakes.nvml.library import GIB, FakeNvml
from tests.fakes.nvml.reader import Clock, devices, failure, reasons, run
from vllm_headroom.model import GpuReadings
from vllm_headroom.scrape.nvml.reader import Nvml
from vllm_headroom.vocabulary import Reason

FOR_EVER = 600.0
PROMPTLY_SECONDS = 20.0
SHORT_SECONDS = 0.2
CALL_TIMEOUT_SECONDS = 1.0
MEMORY = "nvmlDeviceGetMemoryInfo_v2"


def hang(fake: FakeNvml, index: int) -> None:
    fake.gpus[index].hangs = {MEMORY: FOR_EVER}
    fake.write()


def test_the_peak_is_the_highest_of_fast_samples_and_readings_in_the_last_minute(fake: FakeNvml) -> None:
    clock = Clock()

    async def steps(nvml: Nvml) -> None:
        await devices(nvml)
        for step_seconds, used_bytes in ((1.0, 50 * GIB), (1.0, 20 * GIB)):
            clock.seconds += step_seconds
            fake.gpus[0].used_bytes = used_bytes
            fake.write()
            await nvml.sample_used(10)
        for step_seconds, peak_bytes in ((0.0, 50 * GIB), (59.0, 50 * GIB), (0.1, 20 * GIB)):
            clock.seconds += step_seconds
            assert (await devices(nvml))[0].used_peak_bytes == peak_bytes

    run(steps, monotonic=clock)


def test_a_fast_sample_is_the_memory_in_use_of_every_gpu_that_answers(fake: FakeNvml) -> None:
    async def steps(nvml: Nvml) -> None:
        await devices(nvml)
        fake.gpus[0].used_bytes = 50 * GIB
        fake.gpus[1].errors = {MEMORY: 15}
        fake.write()

        assert await nvml.sample_used(10) == {"GPU-0": 50 * GIB, "GPU-2": fake.gpus[2].used_bytes}

    run(steps)


def test_fast_sampling_asks_for_nothing_but_memory(fake: FakeNvml) -> None:
    async def steps(nvml: Nvml) -> None:
        await nvml.sample_used(10)
        assert fake.calls() == []

        await devices(nvml)
        fake.forget_calls()
        await nvml.sample_used(10)
        assert fake.calls() == [f"{MEMORY} GPU-{index}" for index in range(3)]

    run(steps)


def test_a_wait_for_events_that_hangs_costs_only_the_events(fake: FakeNvml) -> None:
    async def steps(nvml: Nvml) -> None:
        await devices(nvml)
        fake.hangs = {"nvmlEventSetWait_v2": FOR_EVER}
        fake.write()
        for _ in range(2):
            await nvml.sample_used(10)
            assert reasons(await devices(nvml)) == [None, None, None]

    run(steps, call_timeout_seconds=CALL_TIMEOUT_SECONDS)

    assert fake.calls().count("nvmlEventSetWait_v2 -") == 1


def test_fast_sampling_that_hangs_neither_raises_nor_delays_the_reading(fake: FakeNvml) -> None:
    async def steps(nvml: Nvml) -> None:
        await devices(nvml)
        hang(fake, 2)
        await nvml.sample_used(10)
        fake.forget_calls()
        assert reasons(await devices(nvml)) == [None, None, Reason.TIMEOUT]
        assert f"{MEMORY} GPU-2" not in fake.calls()

    run(steps, call_timeout_seconds=CALL_TIMEOUT_SECONDS)


def test_a_reading_does_not_wait_for_fast_sampling_beyond_its_time(fake: FakeNvml) -> None:
    async def steps(nvml: Nvml) -> None:
        await devices(nvml)
        hang(fake, 0)
        sampling = asyncio.create_task(nvml.sample_used(FOR_EVER))
        await asyncio.sleep(0)
        assert (await failure(nvml, timeout_seconds=SHORT_SECONDS)).reason is Reason.TIMEOUT
        sampling.cancel()

    run(steps, call_timeout_seconds=FOR_EVER)


def test_fast_sampling_does_not_wait_for_a_reading(fake: FakeNvml) -> None:
    async def steps(nvml: Nvml) -> None:
        await devices(nvml)
        hang(fake, 0)
        reading = asyncio.create_task(nvml.read(FOR_EVER))
        await asyncio.sleep(0)
        async with asyncio.timeout(PROMPTLY_SECONDS):
            await nvml.sample_used(FOR_EVER)
        fake.gpus[0].hangs = {}
        fake.write()
        assert isinstance(await reading, GpuReadings)

    run(steps, call_timeout_seconds=FOR_EVER)
