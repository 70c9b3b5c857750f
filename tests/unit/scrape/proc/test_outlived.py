"""Servers that outlive the process that began them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.fakes.proc_tree import BOOT_SECONDS, ProcTree
from tests.samples import engine, page
from tests.unit.derive.life.watch import REFUSED
from tests.unit.scrape.proc.engines import SERVER, Clock
from tests.unit.scrape.proc.test_orphans import CORE, WORKER
from vllm_headroom.model import ProcessReadings
from vllm_headroom.scrape.proc.reader import Processes

SERVES = page(engine(started_at_seconds=BOOT_SECONDS + 60.0))
BELOW = ((8, 7, CORE), (9, 8, WORKER), (10, 7, "VLLM::APIServer_0"), (11, 7, "VLLM::APIServer_1"))
NEIGHBOURS = (
    (),
    ((20, 1, (*SERVER, "--port", "9000")), (21, 20, (CORE,))),
    ((21, 1, (CORE,)), (22, 1, ("VLLM::APIServer_0",)), (23, 1, ("VLLM::APIServer_1",))),
)


@pytest.mark.parametrize("neighbour", NEIGHBOURS, ids=["alone", "beside an engine", "beside one that lost its own"])
def test_servers_that_answer_without_the_process_that_began_them_are_the_engine(
    tmp_path: Path, neighbour: tuple[tuple[int, int, tuple[str, ...]], ...]
) -> None:
    tree = ProcTree(tmp_path)
    tree.add(7, 1, *SERVER, "--api-server-count", "2", group=7, started_ticks=6000)
    for pid, parent, title in BELOW:
        tree.add(pid, parent, title, group=7, started_ticks=6000)
    processes = Processes(engine_port=8000, proc=tree.path, monotonic=Clock(), rescan_seconds=0.0)
    for pid, parent, command in neighbour:
        tree.add(pid, parent, *command, group=20, started_ticks=7000)
    asyncio.run(processes.read(30, SERVES))

    tree.remove(7)
    for pid, parent, title in BELOW:
        tree.add(pid, 1 if parent == 7 else parent, title, group=7, started_ticks=6000)
    later = Processes(engine_port=8000, proc=tree.path, monotonic=Clock(), rescan_seconds=0.0)
    for reader, page_state in ((processes, SERVES), (processes, REFUSED), (processes, SERVES), (later, SERVES)):
        readings = asyncio.run(reader.read(30, page_state))
        assert isinstance(readings, ProcessReadings)
        assert {process.pid for process in readings.engine} == {8, 9, 10, 11}
        assert not readings.orphans | readings.strays

    tree.remove(10)
    tree.remove(11)
    orphaned_readings = asyncio.run(processes.read(30, REFUSED))
    assert isinstance(orphaned_readings, ProcessReadings)
    assert not orphaned_readings.engine
    assert orphaned_readings.orphans == {8, 9}
