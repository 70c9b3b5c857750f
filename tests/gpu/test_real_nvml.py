import csv
import shutil
import subprocess
import time

import pytest

from tests.fakes.nvml.library import MIB
from tests.fakes.nvml.reader import devices, run
from vllm_headroom.model import GpuReading
from vllm_headroom.scrape.nvml.reader import Nvml

pytestmark = pytest.mark.gpu


async def sampled(nvml: Nvml) -> tuple[GpuReading, ...]:
    await devices(nvml)
    await nvml.sample_used(10)
    return await devices(nvml)


def test_every_gpu_is_read_and_its_memory_adds_up() -> None:
    for gpu in run(sampled):
        assert gpu.failure is None
        assert gpu.uuid.startswith(("GPU-", "MIG-"))
        assert gpu.name
        if gpu.memory is not None and gpu.memory.reserved_bytes is not None:
            parts_bytes = gpu.memory.used_bytes + gpu.memory.free_bytes + gpu.memory.reserved_bytes
            assert parts_bytes == pytest.approx(gpu.memory.total_bytes, rel=0.01)


def test_the_facts_are_plausible() -> None:
    for gpu in run(sampled):
        if gpu.memory is not None:
            assert gpu.used_peak_bytes is not None
            assert gpu.memory.used_bytes <= gpu.used_peak_bytes <= gpu.memory.total_bytes
            # Memory the processes share is counted for each of them, hence the slack.
            known_bytes = sum(process.used_bytes or 0 for process in gpu.processes or ())
            assert known_bytes <= gpu.memory.used_bytes * 1.05 + 64 * MIB
        assert gpu.utilization_ratio is None or 0 <= gpu.utilization_ratio <= 1
        assert gpu.temperature_celsius is None or 5 < gpu.temperature_celsius < 120
        assert gpu.power_watts is None or 1 < gpu.power_watts < 3000


def test_reading_again_is_quick() -> None:
    async def steps(nvml: Nvml) -> float:
        await devices(nvml)
        began = time.perf_counter()
        await devices(nvml)
        return time.perf_counter() - began

    assert run(steps) < 1


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="nvidia-smi is not on the PATH")
def test_nvidia_smi_says_the_same() -> None:
    query = "--query-gpu=index,uuid,name,memory.total,memory.reserved,memory.used"
    output = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True
    )
    whole_gpus = {gpu.uuid: gpu for gpu in run(devices) if gpu.uuid.startswith("GPU-")}

    for index, uuid, name, *mebibytes in csv.reader(output.stdout.splitlines(), skipinitialspace=True):
        if uuid not in whole_gpus:
            continue  # in MIG mode NVML's instances are read, which this query does not show
        gpu = whole_gpus[uuid]
        assert (str(gpu.index), gpu.name) == (index, name)
        if gpu.memory is not None:
            figures = (gpu.memory.total_bytes, gpu.memory.reserved_bytes, gpu.memory.used_bytes)
            for seen_bytes, reported in zip(figures, mebibytes, strict=True):
                assert seen_bytes == pytest.approx(int(reported) * MIB, rel=0.05, abs=64 * MIB)
