"""A tick over a GPU that uses the machine's memory, while loading a model fills the page cache (vllm#54200)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.nvml.library import FakeGpu, FakeNvml
from tests.fakes.nvml.reader import in_process
from tests.fakes.proc_tree import PAGE_BYTES, ProcTree
from tests.samples import values
from tests.unit.daemon.test_sampler_amd import Page
from vllm_headroom import catalog
from vllm_headroom.clock import SystemClock
from vllm_headroom.daemon.engine_watch import Sampler
from vllm_headroom.daemon.sources import Sources
from vllm_headroom.derive.attribution import Selection
from vllm_headroom.derive.tick import TickRules, build_derivations
from vllm_headroom.model import Verdict
from vllm_headroom.parse.engines import parse_engines
from vllm_headroom.scrape.gpus import Gpus
from vllm_headroom.scrape.proc.reader import Processes
from vllm_headroom.vocabulary import Situation

GIB = 2**30
LABELS = ("0", "GPU-gb10")
BEFORE_GIB, AFTER_GIB, SECONDS = 29.0, 2.5, 9


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    unified = FakeGpu(uuid=LABELS[1], name="NVIDIA GB10", total_bytes=None, processes={4380: 80 * GIB})
    with in_process(tmp_path, monkeypatch, [unified]) as fake:
        yield fake


def flood(proc: Path, *, available_gib: float, blocks: int, waiting_percent: float) -> None:
    """Write what the kernel reports about its memory, nearly none of which is free."""
    lines = {"MemTotal": 120.0, "MemFree": 0.4, "MemAvailable": available_gib, "Cached": 28.0}
    (proc / "meminfo").write_text("".join(f"{name}: {int(gib * 2**20)} kB\n" for name, gib in lines.items()))
    above = (2 * 2**20 // PAGE_BYTES).bit_length() - 1
    (proc / "buddyinfo").write_text(f"Node 0, zone   Normal {'90 ' * above}{blocks} 0\n")
    (proc / "pressure").mkdir(exist_ok=True)
    waited = f"avg10={waiting_percent:.2f} avg60=0.00 avg300=0.00 total=7"
    (proc / "pressure" / "memory").write_text(f"some {waited}\nfull {waited}\n")


def test_memory_that_loading_puts_into_the_page_cache_is_seen_each_second(nvml: FakeNvml, tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    proc = ProcTree(tmp_path / "proc")
    proc.add(4380, 1, "python3", "/venv/bin/vllm", "serve", "tiny", "--port", "8000")
    shares = [second / SECONDS for second in range(SECONDS + 1)]
    available = [BEFORE_GIB + share * (AFTER_GIB - BEFORE_GIB) for share in shares]

    async def run() -> tuple[list[float | None], list[float | None], list[Verdict]]:
        clock = SystemClock()
        gpus = Gpus(monotonic=clock.monotonic, sys=tmp_path, proc=proc.path)
        sampler = Sampler(
            sources=Sources(
                engine=Page(),
                gpus=gpus,
                processes=Processes(engine_port=8000, proc=proc.path, monotonic=clock.monotonic).read,
            ),
            parse=parse_engines,
            rules=TickRules(selection=Selection(), derivations=build_derivations()),
            clock=clock,
            gpu_timeout_seconds=20.0,
        )
        free: list[float | None] = []
        blocks: list[float | None] = []
        for second, gib in enumerate(available):
            flood(proc.path, available_gib=gib, blocks=max(40, 14_000 - 2_000 * second), waiting_percent=4.0 * second)
            result = await sampler.tick()
            free.append(values(result.published.samples, catalog.GPU_MEMORY_FREE).get(LABELS))
            blocks.append(values(result.published.samples, catalog.UNIFIED_FREE_BLOCKS).get(LABELS))
        await gpus.close()
        return free, blocks, list(result.verdicts)

    free, blocks, verdicts = asyncio.run(run())

    assert nvml.calls()
    assert free == pytest.approx([gib * GIB for gib in available], abs=1024)
    assert blocks[0] == 14_000 * 2 * 2**20
    assert blocks[-1] == 40 * 2 * 2**20
    assert [(text.situation, text.alert) for text in verdicts if "page cache" in text.sentence] == [
        (Situation.LOW_MEMORY, "HeadroomUnifiedMemoryCached")
    ]
