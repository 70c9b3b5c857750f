"""The kinds of cards, each read by the daemon's own reader from what its driver would say."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pynvml

from tests.fakes.amd_tree import GIB, AmdTree
from tests.fakes.nobody import nobody
from tests.fakes.nvml.library import FakeGpu, FakeInstance, FakeNvml
from tests.fakes.proc_tree import ProcTree
from vllm_headroom.model import GpuReading, GpuReadings
from vllm_headroom.scrape.gpus import Gpus

CARD: Final = "0000:c1:00.0"
CONTAINER: Final = "pid:[4026532555]"
NO_LIST: Final = {"nvmlDeviceGetComputeRunningProcesses_v3": pynvml.NVML_ERROR_NOT_SUPPORTED}

FACTS: Final[dict[str, Callable[[GpuReading], object]]] = {
    "memory": lambda reading: reading.memory,
    "reserved": lambda reading: None if reading.memory is None else reading.memory.reserved_bytes,
    "peak": lambda reading: reading.used_peak_bytes,
    "utilization": lambda reading: reading.utilization_ratio,
    "temperature": lambda reading: reading.temperature_celsius,
    "power": lambda reading: reading.power_watts,
    "memory by process": lambda reading: reading.processes,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of card; `why` gives the reason for what is absent, and whose what is known is."""

    name: str
    made: FakeGpu | Callable[[AmdTree, ProcTree], None]
    why: str


def _card(sys: AmdTree, _: ProcTree) -> None:
    sys.add(CARD, card=1)
    sys.add_node(CARD, 7)


def _contained(sys: AmdTree, proc: ProcTree) -> None:
    _card(sys, proc)
    (proc.path / "self" / "ns" / "pid").unlink()
    (proc.path / "self" / "ns" / "pid").symlink_to(CONTAINER)
    (proc.path / "1" / "fd").mkdir(mode=0)  # of another user's


def _partition(sys: AmdTree, _: ProcTree) -> None:
    sys.add(CARD, card=1)
    for part in range(2):
        sys.add_node(CARD, 7 + part, 96 * GIB, part=part)


def _apu(sys: AmdTree, proc: ProcTree) -> None:
    sys.add(CARD, card=1, total_bytes=GIB // 2)
    sys.add_node(CARD, 7, 62 * GIB)
    (proc.path / "meminfo").write_text(f"MemTotal: {125 * 2**20} kB\nMemAvailable: {90 * 2**20} kB\n")


KINDS: Final = (
    Kind(
        name="NVIDIA GPU",
        made=FakeGpu(uuid="GPU-a", utilization_percent=3, temperature_celsius=41, power_milliwatts=90_000),
        why="",
    ),
    Kind(
        name="NVIDIA MIG instance",
        made=FakeGpu(uuid="GPU-a", mig=True, instances=[FakeInstance(uuid="MIG-a", gpu_instance=1)]),
        why="utilization and power are whatever NVML offers for an instance; XID errors are its own if NVML says so",
    ),
    Kind(
        name="NVIDIA GPU on the machine's memory (GB10, Thor, Jetson)",
        made=FakeGpu(
            uuid="GPU-a", total_bytes=None, utilization_percent=3, temperature_celsius=41, power_milliwatts=90_000
        ),
        why="memory is by /proc/meminfo: total and what the kernel calls available",
    ),
    Kind(
        name="NVIDIA vGPU, in the guest",
        made=FakeGpu(uuid="GPU-a", errors=dict(NO_LIST)),
        why="the guest's driver lists no processes: all that is used counts as the engine's; sensors are the host's",
    ),
    Kind(
        name="AMD card",
        made=_card,
        why="the driver does not report reserved memory, it is part of what is used; there are no XID errors",
    ),
    Kind(
        name="AMD card, from a container that may not trace vLLM",
        made=_contained,
        why="KFD names processes by the machine's pids, and /proc hides from others what a process has open",
    ),
    Kind(
        name="partition of an AMD card (MI300X in CPX)",
        made=_partition,
        why="used is what its processes hold, by KFD; the sensors are the whole card's. Without KFD, or outside the"
        " machine's first PID namespace, its memory is not known either",
    ),
    Kind(
        name="AMD APU with little memory",
        made=_apu,
        why="KFD grants the machine's memory then: total is what it grants, free at most what is available",
    ),
)


def read(kind: Kind, folder: Path, nvml: FakeNvml) -> GpuReading:
    """Return what the daemon's reader reports about a card of this kind."""
    sys = AmdTree(folder / "sys")
    (folder / "proc").mkdir()
    proc = ProcTree(folder / "proc")
    (proc.path / "meminfo").write_text("MemTotal: 128000000 kB\nMemAvailable: 90000000 kB\n")
    nvml.gpus, nvml.errors = [], {"nvmlInitWithFlags": pynvml.NVML_ERROR_DRIVER_NOT_LOADED}
    if isinstance(kind.made, FakeGpu):
        nvml.gpus, nvml.errors = [kind.made], {}
    else:
        kind.made(sys, proc)
    nvml.write()

    async def main() -> GpuReading:
        gpus = Gpus(monotonic=time.monotonic, sys=sys.path, proc=proc.path)
        try:
            readings = await gpus.read(20.0)
        finally:
            await gpus.close()
        assert isinstance(readings, GpuReadings), readings
        return readings.devices[0]

    with nobody() if kind.made is _contained else contextlib.nullcontext():
        return asyncio.run(main())


def table(readings: dict[str, GpuReading]) -> str:
    """Return which facts are known of each kind, and why others are not."""
    head = (f"| card | {' | '.join(FACTS)} | |", f"| --- |{' --- |' * len(FACTS)} --- |")
    rows = (
        f"| {kind.name} | {' | '.join(_known(fact(readings[kind.name])) for fact in FACTS.values())} | {kind.why} |"
        for kind in KINDS
    )
    return "\n".join((*head, *rows))


def _known(value: object) -> str:
    return "-" if value is None else "known"
