"""The real torch on the stand-in card: what it reports about memory is what the ledger and NVML say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from tests.card.card import FOLDER, GIB, MIB, Cards
from tests.process import eventually

pytestmark = pytest.mark.card

PYTHON: Final = str(FOLDER / "venv/bin/python")
SEGMENT: Final = 2 * MIB
"""What torch and the card give small tensors in."""


def run(cards: Cards, body: str, **environment: str) -> Any:
    """Run lines that set `found`, and return it."""
    text = f"import json, os, torch\nGIB, MIB = 2**30, 2**20\n{body}\nprint(json.dumps(found))"
    variables = os.environ | cards.environment() | environment
    done = subprocess.run([PYTHON, "-c", text], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("options", ["", "expandable_segments:True"])
def test_what_torch_reserves_is_what_the_card_holds(tmp_path: Path, options: str) -> None:
    cards = Cards(folder=tmp_path).create()
    body = """
tensors = [torch.empty(size * MIB, dtype=torch.uint8, device="cuda") for size in (1, 3, 30, 700)]
ledger = __import__("pynvml"); ledger.nvmlInit()
(process,) = ledger.nvmlDeviceGetComputeRunningProcesses(ledger.nvmlDeviceGetHandleByIndex(0))
free, total = torch.cuda.mem_get_info()
found = [torch.cuda.memory_reserved(), torch.cuda.memory_allocated(), process.usedGpuMemory, total - free]
"""
    reserved, allocated, held_bytes, used = run(cards, body, PYTORCH_CUDA_ALLOC_CONF=options)

    assert allocated == 734 * MIB
    assert reserved >= allocated
    assert held_bytes == used == reserved + cards.context_bytes
    assert cards.read_holders() == {}, "it gave everything back at its end"


def test_an_out_of_memory_error_names_the_figures_and_the_allocator_goes_on(tmp_path: Path) -> None:
    cards = Cards(folder=tmp_path, total_bytes=4 * GIB, reserved_bytes=0).create()
    body = """
kept = torch.empty(GIB, dtype=torch.uint8, device="cuda")
cached = torch.empty(GIB, dtype=torch.uint8, device="cuda"); del cached
flushed = torch.empty(2 * GIB + 100 * MIB, dtype=torch.uint8, device="cuda")
retries = torch.cuda.memory_stats()["num_alloc_retries"]
try:
    torch.empty(GIB, dtype=torch.uint8, device="cuda")
except torch.cuda.OutOfMemoryError as error:
    found = [retries, torch.cuda.memory_stats()["num_ooms"], str(error), torch.empty(MIB, device="cuda").numel()]
"""
    retries, ooms, message, numbers = run(cards, body)

    assert (retries, ooms, numbers) == (1, 1, MIB)
    assert "has a total capacity of 4.00 GiB" in message
    assert "this process has 3.59 GiB memory in use" in message


def test_visible_devices_and_a_graphs_pool(tmp_path: Path) -> None:
    cards = Cards(folder=tmp_path, count=3).create()
    body = """
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    kept = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
pools = torch.cuda.memory_stats_as_nested_dict(0)["reserved_bytes_by_private_pools"]
ledger = __import__("pynvml"); ledger.nvmlInit()
used = [ledger.nvmlDeviceGetMemoryInfo(ledger.nvmlDeviceGetHandleByIndex(n)).used // MIB for n in range(3)]
found = [torch.cuda.device_count(), str(torch.cuda.get_device_properties(0).uuid)[-1], used, max(
    pool["all"]["current"] for pool in pools.values()) // MIB]
"""
    devices, uuid, used, pool = run(cards, body, CUDA_VISIBLE_DEVICES="2,1")

    assert (devices, uuid) == (2, "2")
    assert used[0] == used[1]
    assert used[2] >= used[0] + 64
    assert pool >= 64


@pytest.mark.parametrize("seconds", [0, 3600])
def test_what_a_killed_process_held_is_given_back(tmp_path: Path, seconds: int) -> None:
    cards = Cards(folder=tmp_path, total_bytes=4 * GIB, reserved_bytes=0, reclaim_seconds=seconds).create()
    variables = os.environ | cards.environment()
    body = 'import torch, time; kept = torch.empty(3 << 30, dtype=torch.uint8, device="cuda"); time.sleep(600)'
    holder = subprocess.Popen([PYTHON, "-c", body], env=variables)
    eventually(lambda: cards.read_holders().get(holder.pid, 0) > 3 * GIB, "it holds", 300, 0.2)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    body = """
try:
    found = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").numel()
except torch.cuda.OutOfMemoryError:
    found = 0
"""

    assert bool(run(cards, body)) == (seconds == 0)
