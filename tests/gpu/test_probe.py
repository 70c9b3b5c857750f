"""The probe's part that needs a card: what it costs, what it sees, and what it must not touch."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pynvml
import pytest

from vllm_headroom_probe.gpu import WorkerGpu

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
MIB: Final = 1 << 20
CALLS: Final = 2000
CALL_SECONDS: Final = 0.001
"""What the reference says is tens of microseconds; twenty looks of so long would be the probe's whole budget."""


@pytest.fixture(scope="module", autouse=True)
def card() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    torch.cuda.init()


@pytest.fixture
def worker() -> Any:
    model = SimpleNamespace(enable_sleep_mode=False, enable_cumem_allocator=False)
    config = SimpleNamespace(model_config=model)
    return SimpleNamespace(vllm_config=config, device=torch.device("cuda", 0), model_runner=SimpleNamespace())


def test_the_figures_are_torchs_own_and_the_uuid_is_nvmls(worker: Any) -> None:
    kept_tensor = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda:0")
    device_facts = WorkerGpu().read_device(worker)
    pynvml.nvmlInit()
    uuids = [pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(n)) for n in range(pynvml.nvmlDeviceGetCount())]

    assert device_facts is not None
    assert device_facts["uuid"] in uuids
    assert device_facts["allocated"] == torch.cuda.memory_allocated(0) >= kept_tensor.nbytes
    assert device_facts["reserved"] == torch.cuda.memory_reserved(0)
    assert device_facts["retries"] is not None


def test_a_call_under_load_is_short(worker: Any) -> None:
    gpu, seconds = WorkerGpu(), []
    matrix = torch.randn(2048, 2048, device="cuda:0")
    for _ in range(CALLS):
        matrix = (matrix @ matrix).tanh()
        gpu.read_device(worker)
        seconds.append(gpu.call_seconds)
    torch.cuda.synchronize()
    quantiles = statistics.quantiles(seconds, n=100)

    sys.stdout.write(
        f"p50 {quantiles[49] * 1e6:.1f} us, p99 {quantiles[98] * 1e6:.1f} us, max {max(seconds) * 1e6:.1f} us\n"
    )
    assert quantiles[98] < CALL_SECONDS


def test_a_leak_shows_in_allocated_bytes_long_before_nvml(worker: Any) -> None:
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    gpu = WorkerGpu()
    slack = torch.empty(600 * MIB, dtype=torch.uint8, device="cuda:0")
    del slack  # which the allocator keeps, as a server's does after its first requests
    first_facts, used = gpu.read_device(worker), pynvml.nvmlDeviceGetMemoryInfo(handle).used
    kept_tensors = [torch.empty(2 * MIB, dtype=torch.uint8, device="cuda:0") for _ in range(100)]
    last_facts, later = gpu.read_device(worker), pynvml.nvmlDeviceGetMemoryInfo(handle).used

    assert first_facts is not None
    assert last_facts is not None
    assert len(kept_tensors) == 100
    assert last_facts["allocated"] - first_facts["allocated"] >= 200 * MIB
    assert later - used < 100 * MIB, "the allocator's slack hides it from NVML"


def test_no_context_is_made_on_another_card(worker: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU")
    pynvml.nvmlInit()
    other_card = pynvml.nvmlDeviceGetHandleByIndex(1)
    old_count = len(pynvml.nvmlDeviceGetComputeRunningProcesses(other_card))
    WorkerGpu().read_device(worker)

    assert len(pynvml.nvmlDeviceGetComputeRunningProcesses(other_card)) == old_count


COLLIDE: Final = """
import sys, threading
from types import SimpleNamespace
import torch
from vllm.device_allocator.cumem import CuMemAllocator
from vllm_headroom_probe.gpu import WorkerGpu
torch.cuda.init()
pool = CuMemAllocator.get_instance()
model = SimpleNamespace(enable_sleep_mode=sys.argv[1] == "guarded", enable_cumem_allocator=False)
worker = SimpleNamespace(vllm_config=SimpleNamespace(model_config=model), device=torch.device("cuda", 0))
def look():
    gpu = WorkerGpu()
    while True:
        if sys.argv[1] == "guarded":
            gpu.read_device(worker)
        else:
            torch.cuda.memory_stats_as_nested_dict(0)
threading.Thread(target=look, daemon=True).start()
with pool.use_memory_pool(tag="weights"):
    tensors = [torch.empty(64 << 20, dtype=torch.uint8, device="cuda:0") for _ in range(200)]
print("alive")
"""


@pytest.mark.parametrize("way", ["guarded", "unguarded"])
def test_the_guard_of_the_sleep_pool(way: str, tmp_path: Path) -> None:
    """With the guard the process runs; without it, its threads wait for each other."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    script = tmp_path / "collide.py"
    script.write_text(COLLIDE)
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, str(script), way], capture_output=True, text=True, check=False, timeout=60
        )
        alive = done.stdout.endswith("alive\n")
        why = done.stderr[-2000:]
    except subprocess.TimeoutExpired:
        alive, why = False, "it hangs"
    sys.stdout.write(f"{way}: {'alive' if alive else why} after {time.monotonic() - began:.0f} s\n")

    assert alive is (way == "guarded"), why


def test_the_observer_is_called_before_an_out_of_memory_error() -> None:
    seen_errors: list[tuple[int, int, int, int]] = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *figures: seen_errors.append(figures))
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda:0")

    assert seen_errors
    device, asked_bytes, total, free = seen_errors[0]
    assert device == 0
    assert asked_bytes >= 1 << 50
    assert 0 < free <= total
