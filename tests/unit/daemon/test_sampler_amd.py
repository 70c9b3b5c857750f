"""A tick over AMD's cards: what is derived and shown does not know whose they are."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from tests.fakes.amd_tree import GIB, MI300X_BYTES, AmdTree
from tests.fakes.nvml.library import FakeNvml
from tests.fakes.nvml.reader import in_process
from tests.fakes.proc_tree import ProcTree
from tests.samples import values
from tests.unit.commands.doctor.looking import RECORDED
from vllm_headroom import catalog
from vllm_headroom.clock import SystemClock
from vllm_headroom.daemon.engine_watch import Sampler
from vllm_headroom.daemon.sources import Sources
from vllm_headroom.derive.attribution import Selection
from vllm_headroom.derive.tick import TickRules, build_derivations
from vllm_headroom.model import Sample
from vllm_headroom.parse.engines import parse_engines
from vllm_headroom.scrape.gpus import Gpus
from vllm_headroom.scrape.proc.reader import Processes

CARDS = ("0000:c1:00.0", "0000:e5:00.0")
FIRST, SECOND = (("0", "GPU-0000000000000000"), ("1", "GPU-0000000000000001"))
WORKER, NEIGHBOUR = 4380, 17


class Page:
    async def fetch(self) -> str:
        return RECORDED

    async def close(self) -> None:
        """Have nothing to let go of."""


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    with in_process(tmp_path, monkeypatch) as fake:
        fake.errors = {"nvmlInitWithFlags": pynvml.NVML_ERROR_DRIVER_NOT_LOADED}
        fake.write()
        yield fake


@pytest.fixture
def samples(nvml: FakeNvml, tmp_path: Path) -> tuple[Sample, ...]:
    """What is published of two cards, the engine on the second and a neighbour on both."""
    assert nvml.errors
    sys = AmdTree(tmp_path / "sys")
    for number, address in enumerate(CARDS):
        sys.add(address, card=number + 1, unique_id=f"{number:016}", used_bytes=(number + 1) * 50 * GIB)
        sys.add_node(address, 100 + number)
    sys.hold(WORKER, {100: 0, 101: 90 * GIB})
    sys.hold(NEIGHBOUR, {100: 49 * GIB, 101: 5 * GIB})
    (tmp_path / "proc").mkdir()
    proc = ProcTree(tmp_path / "proc")
    proc.add(WORKER, 1, "python3", "/venv/bin/vllm", "serve", "tiny", "--port", "8000")
    proc.add(NEIGHBOUR, 1, "python3", "train.py")
    return asyncio.run(_ticked(sys, proc))


async def _ticked(sys: AmdTree, proc: ProcTree) -> tuple[Sample, ...]:
    clock = SystemClock()
    gpus = Gpus(monotonic=clock.monotonic, sys=sys.path, proc=proc.path)
    processes = Processes(engine_port=8000, proc=proc.path, monotonic=clock.monotonic)
    sampler = Sampler(
        sources=Sources(engine=Page(), gpus=gpus, processes=processes.read),
        parse=parse_engines,
        rules=TickRules(selection=Selection(), derivations=build_derivations()),
        clock=clock,
        gpu_timeout_seconds=20.0,
    )
    await sampler.tick()
    await gpus.close()
    assert sampler.published is not None
    return sampler.published.samples


def test_the_series_are_those_of_any_gpu(samples: tuple[Sample, ...]) -> None:
    name = "AMD Instinct MI300X OAM"

    assert values(samples, catalog.GPU_INFO) == {(*FIRST, name, ""): 1.0, (*SECOND, name, "process"): 1.0}
    assert values(samples, catalog.GPU_MEMORY_TOTAL) == {FIRST: MI300X_BYTES, SECOND: MI300X_BYTES}
    assert values(samples, catalog.GPU_MEMORY_USED) == {FIRST: 50 * GIB, SECOND: 100 * GIB}
    assert values(samples, catalog.GPU_TEMPERATURE) == {FIRST: 41.0, SECOND: 41.0}
    assert values(samples, catalog.SOURCE_UP)["nvml",] == 1.0


def test_the_ledger_tells_the_engine_from_its_neighbour(samples: tuple[Sample, ...]) -> None:
    held_bytes = values(samples, catalog.GPU_MEMORY_HELD)

    assert {labels[2]: value for labels, value in held_bytes.items() if labels[:2] == SECOND} == {
        "engine": 90 * GIB,
        "other": 5 * GIB,
        "unattributed": 5 * GIB,
    }
    assert {labels[2]: value for labels, value in held_bytes.items() if labels[:2] == FIRST} == {
        "engine": 0,
        "other": 49 * GIB,
        "unattributed": GIB,
    }


def test_reported_and_held_memory_are_compared(samples: tuple[Sample, ...]) -> None:
    (labels,) = values(samples, catalog.MEMORY_DISCREPANCY)

    assert labels[:2] == SECOND
