"""Several engines in one daemon, each as if a daemon watched it alone."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from msgspec.structs import replace

from tests.fakes.engine_server import EngineServer, page
from tests.logs import capture_logs
from vllm_headroom import catalog, worker
from vllm_headroom.clock import SystemClock
from vllm_headroom.config import Settings
from vllm_headroom.daemon import node as node_module
from vllm_headroom.daemon.app import build_engine_watch
from vllm_headroom.daemon.engine_watch import EngineWatch
from vllm_headroom.daemon.evict import Evictor
from vllm_headroom.daemon.model_reader import NO_MODEL
from vllm_headroom.daemon.node import LAST_SAMPLE_SECONDS, UNIT_SECONDS, NodeWatch, SharedGpus, WatchParts
from vllm_headroom.daemon.node_daemon import NodeDaemon, list_folder_parts
from vllm_headroom.daemon.parts import NodeParts, Parts
from vllm_headroom.daemon.sources import GpuSource, close_all
from vllm_headroom.daemon.state.folders import MOST_RECENT, MOST_UNUSED, name_folder, remove_unused
from vllm_headroom.expose.answers import Request
from vllm_headroom.model import (
    EngineName,
    EnginePage,
    EngineProcess,
    Failure,
    GpuMemory,
    GpuProcess,
    GpuReading,
    GpuReadings,
    ProcessReadings,
    Sample,
)
from vllm_headroom.scrape.proc.host import MachineReading
from vllm_headroom.scrape.proc.node import LocatedEngine, NodeProcesses
from vllm_headroom.scrape.proc.reader import Scope
from vllm_headroom.units import GIB
from vllm_headroom.vocabulary import EngineKind, Role, ServerAnswer

PAGE_OF_ANOTHER = 'vllm:num_requests_running{engine="0",model_name="m"} 1.0\n'
CLOSED_URL = "http://127.0.0.1:9/metrics"

OF_THE_MACHINE = {catalog.SOURCE_READ_SECONDS.name, catalog.SAMPLE_SKEW.name}
"""Times that were measured: they differ from reading to reading."""


class Clock(SystemClock):
    """Stands until a test sets it."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def time(self) -> float:
        return 1_700_000_000 + self.seconds

    def monotonic(self) -> float:
        return self.seconds


class Gpus:
    """Three cards: one engine's, another's, and nobody's."""

    def __init__(self) -> None:
        self.readings = 0

    async def read(self, _timeout_seconds: float) -> GpuReadings | Failure:
        self.readings += 1
        memory = GpuMemory(total_bytes=80 * GIB, used_bytes=60 * GIB, free_bytes=20 * GIB, reserved_bytes=0)
        holders = (GpuProcess(pid=101, used_bytes=60 * GIB),), (GpuProcess(pid=201, used_bytes=59 * GIB),), ()
        return GpuReadings(
            driver_version="580.00",
            devices=tuple(
                GpuReading(index=index, uuid=f"GPU-{index}", name="H100", memory=memory, processes=processes)
                for index, processes in enumerate(holders)
            ),
        )

    async def sample_used(self, _timeout_seconds: float) -> dict[str, int]:
        return {"GPU-0": 60 * GIB}

    async def close(self) -> None:
        pass


class Engine:
    """The page and the processes of one engine; `answer` may be replaced."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.requests = 0
        self.is_closed = False
        self.answer: Callable[[], Coroutine[Any, Any, str]] = self.serve
        self.reads: list[str] = []
        """What is read, in order; a test may share it between engines."""
        self.hold: asyncio.Event | None = None
        """Where set, the processes cannot be read before the event."""

    async def serve(self) -> str:
        return (
            f'vllm:num_requests_running{{engine="0",model_name="m{self.number}"}} {self.number}.0\n'
            f'vllm:generation_tokens_total{{engine="0",model_name="m{self.number}"}} {self.requests}.0\n'
        )

    async def fetch(self) -> str | Failure:
        self.requests += 1
        self.reads.append(f"page {self.number}")
        return await self.answer()

    async def read_processes(self, _timeout: float, _page: EnginePage | Failure) -> ProcessReadings | Failure:
        self.reads.append(f"processes {self.number}")
        if self.hold is not None:
            await self.hold.wait()
        core = EngineProcess(
            pid=100 * self.number + 1, role=Role.ENGINE_CORE, rss_bytes=GIB, started_at_seconds=1_700_000_000.0
        )
        return ProcessReadings(
            engine=(core,), visible_pids=frozenset({1, 101, 201}), sees_host_pids=True, zombies=frozenset()
        )

    async def close(self) -> None:
        self.is_closed = True


class Found:
    """What is found in /proc."""

    def __init__(self, *engines: LocatedEngine) -> None:
        self.engines = engines
        self.pods = {engine.owner_key for engine in engines}

    async def scan(self, timeout_seconds: float) -> None:
        pass

    async def find_engines(self, _timeout_seconds: float) -> tuple[LocatedEngine, ...]:
        return self.engines

    def has_processes(self, owner_key: str) -> bool:
        return owner_key in self.pods

    def read_scope(self, _owner_key: str) -> Scope:
        return Scope(
            visible_pids=frozenset(), own_pids=frozenset(), list_waits=lambda _: None, machine=MachineReading()
        )


def locate(number: int, kind: EngineKind = EngineKind.WATCHED, uid: str = "") -> LocatedEngine:
    owner_key = f"pod:{uid or f'uid-{number}'}"
    return LocatedEngine(
        kind=kind,
        key=f"{owner_key}:8000",
        owner_key=owner_key,
        name=EngineName(namespace="default", pod=f"llama-{number}", container="vllm"),
        port=8000,
        page_url=f"http://10.0.0.{number}:8000/metrics" if kind is EngineKind.WATCHED else "",
    )


class World:
    def __init__(self, *located: LocatedEngine) -> None:
        self.clock = Clock()
        self.gpus = Gpus()
        self.engines = {number: Engine(number) for number in (1, 2, 3)}
        self.found = Found(*located)
        self.node = NodeWatch(
            gpus=self.gpus,
            processes=cast("NodeProcesses", self.found),
            build_engine=self.build_engine,
            clock=self.clock,
            interval_seconds=5.0,
            gpu_timeout_seconds=2.0,
        )

    def build_parts(self, number: int, gpus: GpuSource) -> Parts:
        engine = self.engines[number]
        return Parts(engine=engine, gpus=gpus, processes=engine.read_processes, clock=self.clock)

    def build_engine(self, located: LocatedEngine, gpus: SharedGpus) -> WatchParts:
        engine = self.engines[int(located.name.text[-1])]
        watch = build_engine_watch(self.build_parts(engine.number, gpus), Settings(), NO_MODEL, None)
        return WatchParts(watch=watch, resources=(engine,))

    async def tick(self, times: int = 1) -> None:
        for _ in range(times):
            await self.node.tick()
            for _ in range(50):  # let the engines' samples end that can
                await asyncio.sleep(0)
            self.clock.seconds += 5

    def scrape(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        published = self.node.build_published()
        assert published is not None
        return read(published.samples)

    def scrape_times(self) -> dict[str | None, float]:
        """Return when each engine was last sampled, by its pod."""
        times: dict[str | None, float] = {}
        for engine in self.node.engines.values():
            assert engine.watch.published is not None
            times[engine.name.pod] = engine.watch.published.monotonic_seconds
        return times

    def states(self) -> set[str]:
        return {dict(labels).get("pod", "") for name, labels in self.scrape() if name == catalog.ENGINE_STATE.name}


def read(samples: tuple[Sample, ...]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the values by name and labels; fail where a series is there twice."""
    series = [(metric.name, tuple(sorted(zip(metric.labels, labels, strict=True)))) for metric, labels, _ in samples]
    assert len(set(series)) == len(series)
    return dict(zip(series, [sample.value for sample in samples], strict=True))


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def test_the_page_is_the_union_of_what_each_engines_own_daemon_exports() -> None:
    async def compare() -> None:
        world = World(locate(1), locate(2))
        parts = {number: world.build_parts(number, Gpus()) for number in (1, 2)}
        alone = {number: build_engine_watch(parts[number], Settings(), NO_MODEL, None) for number in parts}
        for _ in range(3):
            for watch in alone.values():
                await watch.sample()
            for engine in world.engines.values():
                engine.requests -= bool(engine.requests)
            await world.tick()
        union = world.scrape()

        for number, watch in alone.items():
            own_labels = {"namespace": "default", "pod": f"llama-{number}", "container": "vllm"}
            wanted = {}
            assert watch.published is not None
            for (name, labels), value in read(watch.published.samples).items():
                is_machines = dict(labels).get("source") == "nvml"
                is_others = dict(labels).get("uuid") not in {None, "", f"GPU-{number - 1}"}
                if not is_machines and not is_others:
                    wanted[name, tuple(sorted((*labels, *own_labels.items())))] = value
            own_series = {key: value for key, value in union.items() if own_labels.items() <= dict(key[1]).items()}
            assert own_series.keys() == wanted.keys()
            assert {key: value for key, value in own_series.items() if key[0] not in OF_THE_MACHINE} == {
                key: value for key, value in wanted.items() if key[0] not in OF_THE_MACHINE
            }

    run(compare)


@pytest.mark.parametrize("faulty", ["read", "scan", "find_engines"])
def test_a_reader_of_the_machine_that_raises_costs_its_own_part(faulty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_timeout_seconds: float) -> Any:
        raise IndexError("range")

    async def look() -> None:
        world = World(locate(1), locate(2))
        await world.tick(2)
        monkeypatch.setattr(world.gpus if faulty == "read" else world.found, faulty, fail)
        with capture_logs() as lines:
            await world.tick(3)

        assert world.states() == {"llama-1", "llama-2"}, "the engines are watched on"
        source_up = {
            dict(labels)["source"]: value
            for (name, labels), value in world.scrape().items()
            if name == catalog.SOURCE_UP.name
        }
        assert source_up["nvml"] == float(faulty != "read")
        assert source_up["engine"] == 1.0
        assert [line["log_level"] for line in lines].count("error") == 1, "it is logged once"

    run(look)


def test_a_card_that_no_engine_holds_is_there_once_and_without_their_labels() -> None:
    async def look() -> None:
        world = World(locate(1), locate(2))
        await world.tick(2)
        cards = [dict(labels) for name, labels in world.scrape() if name == catalog.GPU_MEMORY_USED.name]
        assert sorted((card["uuid"], card.get("pod")) for card in cards) == [
            ("GPU-0", "llama-1"),
            ("GPU-1", "llama-2"),
            ("GPU-2", None),
        ]
        assert next(card for card in cards if card["uuid"] == "GPU-2").keys() == {"gpu", "uuid"}

    run(look)


def test_without_engines_the_page_has_every_card_and_counts_none() -> None:
    async def look() -> None:
        world = World()
        assert world.node.build_published() is None
        await world.tick()
        union = world.scrape()
        assert sum(name == catalog.GPU_MEMORY_USED.name for name, _ in union) == 3
        assert union[catalog.ENGINES.name, (("kind", "watched"),)] == 0
        assert union[catalog.SOURCE_UP.name, (("source", "nvml"),)] == 1

    run(look)


def test_the_gpus_are_read_once_a_tick_however_many_engines_there_are() -> None:
    async def count() -> None:
        world = World(locate(1), locate(2), locate(3))
        await world.tick(4)
        assert world.gpus.readings == 4
        assert [engine.requests for engine in world.engines.values()] == [4, 4, 4]

    run(count)


def test_an_engine_that_hangs_costs_the_others_no_sample_and_has_no_old_series() -> None:
    async def hang() -> None:
        world = World(locate(1), locate(2))
        await world.tick(2)
        world.engines[1].answer = asyncio.Event().wait  # type: ignore[assignment]
        await world.tick(2)
        assert world.states() == {"llama-1", "llama-2"}
        await world.tick(3)
        assert world.states() == {"llama-2"}
        assert (world.engines[1].requests, world.engines[2].requests) == (3, 7)

    run(hang)


def test_a_search_for_engines_is_reported_once_where_it_hangs_and_not_where_cpu_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vllm_headroom.daemon.node.FIND_SECONDS", 0.0)

    async def search() -> None:
        world = World(locate(1))
        monkeypatch.setattr(world.found, "find_engines", lambda _timeout_seconds: asyncio.Event().wait())
        with capture_logs() as lines:
            await world.tick(3)
            assert not [line for line in lines if line["event"] == "engines are not followed"]
            await world.tick(3)
        assert len([line for line in lines if line["event"] == "engines are not followed"]) == 1

    run(search)


def test_an_engine_whose_record_raises_is_sampled_on_like_the_others() -> None:
    async def spoil() -> None:
        world = World(locate(1), locate(2))
        await world.tick()

        async def fail(_: object) -> None:
            raise ZeroDivisionError

        cast("Any", world.node.engines["pod:uid-1:8000"].watch).record = fail
        with capture_logs() as lines:
            await world.tick(3)
        faults = [line["of_engine"] for line in lines if line["event"] == "engine cannot be sampled"]
        assert faults == ["default/llama-1"]
        assert (world.engines[1].requests, world.engines[2].requests) == (4, 4)

    run(spoil)


def test_an_engine_that_is_down_stays_while_its_pod_exists() -> None:
    async def crash() -> None:
        world = World(locate(1))
        await world.tick()
        world.found.engines = ()
        await world.tick(80)
        assert world.states() == {"llama-1"}

    run(crash)


@pytest.mark.parametrize("is_scraped", [True, False])
def test_an_engine_whose_pod_is_gone_leaves_after_its_last_word(is_scraped: bool) -> None:  # noqa: FBT001
    async def leave() -> None:
        world = World(locate(1), locate(2))
        await world.tick()
        world.found.engines = (locate(2),)
        world.found.pods = {"pod:uid-2"}
        await world.tick(4)
        assert set(world.node.engines) == {"pod:uid-1:8000", "pod:uid-2:8000"}
        if is_scraped:
            assert world.states() == {"llama-1", "llama-2"}
            await world.tick()
        else:
            await world.tick(int(LAST_SAMPLE_SECONDS / 5))
        assert world.states() == {"llama-2"}
        assert world.engines[1].is_closed

    run(leave)


def test_a_pod_that_comes_back_with_its_name_takes_the_place_of_the_one_that_is_gone() -> None:
    async def reschedule() -> None:
        world = World(locate(1))
        await world.tick()
        world.found.engines = (locate(1, uid="new"),)
        world.found.pods = {"pod:new"}
        await world.tick(2)
        assert set(world.node.engines) == {"pod:new:8000"}
        assert world.states() == {"llama-1"}

    run(reschedule)


def test_an_engine_outside_kubernetes_stays_for_longer_than_any_alert_waits() -> None:
    async def stop() -> None:
        located = LocatedEngine(
            kind=EngineKind.WATCHED,
            key="/vllm-1",
            owner_key="/vllm-1",
            name=EngineName(unit="vllm-1"),
            page_url="http://127.0.0.1:8000/metrics",
        )
        world = World(located)
        await world.tick()
        world.found.engines = ()
        await world.tick(int(UNIT_SECONDS / 5))
        assert len(world.node.engines) == 1
        await world.tick(2)
        assert world.node.engines == {}

    run(stop)


def test_an_engine_that_gets_a_sidecar_is_left_to_it_and_counted() -> None:
    async def add_sidecar() -> None:
        world = World(locate(1), locate(2))
        await world.tick()
        world.found.engines = (locate(1, EngineKind.OWN_SIDECAR), locate(2), locate(3, EngineKind.UNREADABLE))
        with capture_logs() as lines:
            await world.tick(3)
        union = world.scrape()
        assert [union[catalog.ENGINES.name, (("kind", str(kind)),)] for kind in EngineKind] == [1, 1, 1]
        assert world.states() == {"llama-2"}
        assert [line["of_engine"] for line in lines if line["event"] == "engine is not watched"] == [
            "default/llama-1",
            "default/llama-3",
        ]

    run(add_sidecar)


def test_a_watched_engine_whose_port_is_unknown_while_it_starts_is_watched_on_and_not_counted_twice() -> None:
    async def restart() -> None:
        world = World(locate(1))
        await world.tick()
        world.found.engines = (locate(1, EngineKind.UNREADABLE),)
        await world.tick(3)
        union = world.scrape()
        assert union[catalog.ENGINES.name, (("kind", "unreadable"),)] == 0
        assert world.states() == {"llama-1"}

    run(restart)


def test_engines_that_come_and_go_leave_nothing_behind() -> None:
    async def churn() -> None:
        world = World()
        for number in range(50):
            world.found.engines = (locate(1, uid=f"uid-{number}"),)
            world.found.pods = {f"pod:uid-{number}"}
            await world.tick()
        assert len(world.node.engines) == 1
        assert len(asyncio.all_tasks()) < 6

    run(churn)


def test_an_engine_that_is_gone_is_collected_at_the_next_tick_so_that_its_threads_end() -> None:
    async def leave() -> None:
        world = World(locate(1))
        await world.tick()
        (engine,) = world.node.engines.values()
        watched = weakref.ref(engine)
        del engine
        world.found.engines = (locate(1, uid="uid-2"),)
        world.found.pods = {"pod:uid-2"}
        await world.tick(2)
        assert watched() is None

    gc.disable()
    try:
        run(leave)
    finally:
        gc.enable()


def test_the_probe_of_an_engine_is_read_from_the_folder_with_its_pods_uid(tmp_path: Path) -> None:
    async def look() -> None:
        world = World()
        ending = asyncio.get_running_loop().create_future()
        settings = Settings(engines="node", probe_dir=tmp_path)
        parts = NodeParts(gpus=world.gpus, processes=None, clock=world.clock)
        daemon = cast("Any", NodeDaemon(parts, settings, home="/", ending=ending))
        for number, is_read in ((1, True), (2, False)):
            engine = daemon._build_engine(replace(locate(number), page_url=CLOSED_URL), SharedGpus(world.gpus))
            await engine.watch.sample()
            probe = engine.watch.latest.snapshot.probe
            assert isinstance(probe, Failure) is is_read, "a folder without files is a failure, and no folder no source"
            await close_all(*engine.resources)

    (tmp_path / "uid-1").mkdir()
    run(look)


def test_an_engine_whose_pod_is_gone_is_not_asked_because_its_address_may_be_anothers() -> None:
    async def look() -> None:
        world = World()
        ending = asyncio.get_running_loop().create_future()
        parts = NodeParts(gpus=world.gpus, processes=cast("NodeProcesses", world.found), clock=world.clock)
        daemon = cast("Any", NodeDaemon(parts, Settings(engines="node"), home="/", ending=ending))
        with EngineServer(page(PAGE_OF_ANOTHER)) as server:
            for is_gone in (False, True):
                located = replace(locate(1), page_url=server.url)
                world.found.pods = set() if is_gone else {located.owner_key}
                engine = daemon._build_engine(located, SharedGpus(world.gpus))
                reading = await engine.watch._sampler._sources.engine.fetch()
                server_reply = await engine.resources[2].send()
                assert isinstance(reading, Failure) is is_gone
                assert (server_reply.answer is ServerAnswer.SILENT) is is_gone
                await close_all(*engine.resources)
            requests = len(server.requests)
        assert requests == 4, "a page and the three other pages of the server, before the pod was gone"

    run(look)


def test_the_processes_of_all_engines_are_read_before_their_pages_and_one_that_hangs_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def look() -> None:
        world = World(locate(1), locate(2))
        first, second = world.engines[1], world.engines[2]
        reads = first.reads = second.reads
        await world.tick()
        assert reads == ["page 1", "processes 1", "page 2", "processes 2"], "the first page helps to find the processes"
        reads.clear()
        await world.tick()
        assert reads == ["processes 1", "processes 2", "page 1", "page 2"]

        monkeypatch.setattr(node_module, "PROCESSES_SECONDS", 0.01)
        first.hold = asyncio.Event()
        for ticks in (3, 4):
            await world.tick()
            assert world.scrape_times() == {"llama-1": 1005.0, "llama-2": 1000.0 + 5 * (ticks - 1)}
        first.hold.set()
        await world.tick()
        await world.tick()
        assert set(world.scrape_times().values()) == {1025.0}

    run(look)


def test_one_thread_reads_the_processes_of_all_engines_and_one_that_hangs_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released = threading.Event()
    readers: list[tuple[str, int]] = []

    def read_scope(owner_key: str) -> Scope:
        readers.append((owner_key, threading.get_ident()))
        if owner_key == "pod:uid-1":
            released.wait()
        own_pids = frozenset({os.getpid()})
        return Scope(visible_pids=own_pids, own_pids=own_pids, list_waits=lambda _: None, machine=MachineReading())

    async def look() -> None:
        world = World(*(locate(number) for number in (1, 2, 3)))
        monkeypatch.setattr(world.found, "read_scope", read_scope)
        ending = asyncio.get_running_loop().create_future()
        parts = NodeParts(gpus=world.gpus, processes=cast("NodeProcesses", world.found), clock=world.clock)
        daemon = cast("Any", NodeDaemon(parts, Settings(engines="node"), home="/", ending=ending))
        hanging, *other_readers = [daemon._build_processes(locate(number)) for number in (1, 2, 3)]
        hanging_task = asyncio.create_task(hanging.read(60))
        await asyncio.sleep(0)
        for reading in await asyncio.gather(*(processes.read(60) for processes in other_readers)):
            assert isinstance(reading, ProcessReadings)
        assert not hanging_task.done()
        released.set()
        assert isinstance(await hanging_task, ProcessReadings)
        readers.clear()
        monkeypatch.setattr(worker, "TURN_SECONDS", 60.0)  # however busy the machine is
        await asyncio.gather(*(processes.read(60) for processes in (hanging, *other_readers)))

        assert [owner_key for owner_key, _ in readers] == ["pod:uid-1", "pod:uid-2", "pod:uid-3"]
        assert len({thread for _, thread in readers}) == 1

    run(look)


class Evictions:
    """Replaces the evictor of an engine's pod."""

    def __init__(self, *, is_hanging: bool = False) -> None:
        self.turns: list[str | None] = []
        self.is_given_back = False
        self._is_hanging = is_hanging

    async def turn(self, due: str | None) -> None:
        self.turns.append(due)
        if self._is_hanging:
            await asyncio.Event().wait()

    async def give_lease_back(self) -> None:
        self.is_given_back = True


def test_each_engines_pod_is_evicted_by_its_own_newest_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """An API server that hangs for one engine, and an engine without a new sample, do not evict another pod."""

    def find_latest(watch: EngineWatch) -> Any:
        (number,) = {engine.located.name.text[-1] for engine in world.node.engines.values() if engine.watch is watch}
        return SimpleNamespace(gate=SimpleNamespace(due=f"llama-{number} leaks"))

    async def evict() -> None:
        evictions = {1: Evictions(is_hanging=True), 2: Evictions(), 3: Evictions()}
        build_engine = world.build_engine

        def build_evicted(located: LocatedEngine, gpus: SharedGpus) -> WatchParts:
            parts = build_engine(located, gpus)
            return WatchParts(
                watch=parts.watch,
                evictor=cast("Evictor", evictions[int(located.name.text[-1])]),
                resources=parts.resources,
            )

        cast("Any", world.node)._build_engine = build_evicted
        await world.tick(2)
        world.engines[3].answer = asyncio.Event().wait  # type: ignore[assignment]
        await world.tick(5)
        monkeypatch.setattr(EngineWatch, "latest", property(find_latest))
        for _ in range(2):
            await world.node.begin_eviction_turns()
            await asyncio.sleep(0)
        assert {number: fake.turns for number, fake in evictions.items()} == {
            1: ["llama-1 leaks"],
            2: ["llama-2 leaks"] * 2,
            3: [None] * 2,
        }
        monkeypatch.undo()
        world.found.engines = ()
        world.found.pods = set()
        await world.tick(int(LAST_SAMPLE_SECONDS / 5) + 3)
        assert world.node.engines == {}
        assert all(fake.is_given_back for fake in evictions.values())

    world = World(locate(1), locate(2), locate(3))
    run(evict)


class TestDaemon:
    """The pages of the daemon."""

    @staticmethod
    def ask(path: str, query: str = "") -> httpx.Response:
        async def answer() -> httpx.Response:
            world = World(locate(1), locate(2), locate(3, EngineKind.OWN_SIDECAR))
            await world.tick(2)
            ending = asyncio.get_running_loop().create_future()
            parts = NodeParts(gpus=world.gpus, processes=None, clock=world.clock)
            daemon = NodeDaemon(parts, Settings(engines=("http://h/metrics",)), home="/", ending=ending)
            cast("Any", daemon)._node = world.node
            response = daemon.build_handler(None)(Request(method="GET", path=path, query=query, headers={}))
            return httpx.Response(response.status, content=response.body)

        return asyncio.run(answer())

    def test_the_document_lists_the_engines_in_a_versioned_envelope(self) -> None:
        document = self.ask("/snapshot.json").json()

        assert document["headroom_node"] == 1
        assert [(engine["engine"], engine["container"]) for engine in document["engines"]] == [
            ("default/llama-1", "vllm"),
            ("default/llama-2", "vllm"),
        ]
        assert document["engines"][1]["snapshot"]["engines"][0]["requests_running"] == 2
        assert [engine["engine"] for engine in document["own_sidecar"]] == ["default/llama-3"]

    @pytest.mark.parametrize("name", ["default/llama-2", "default/llama-2/vllm"])
    def test_the_document_of_one_engine_is_as_of_a_daemon_that_watches_it_alone(self, name: str) -> None:
        document = self.ask("/snapshot.json", f"engine={name}").json()

        assert document["headroom_snapshot"] == 1
        assert document["engines"][0]["model_name"] == "m2"

    @pytest.mark.parametrize("path", ["/", "/snapshot.json"])
    def test_a_name_that_no_engine_has_is_refused_with_those_there_are(self, path: str) -> None:
        response = self.ask(path, "engine=default/other")

        assert response.status_code == 404
        assert "default/llama-1, default/llama-2" in response.text

    def test_the_page_lists_the_engines_with_links_to_their_own(self) -> None:
        page = self.ask("/").text

        assert re.search(r"<h1>2 engines on [^<]+</h1>", page)
        assert "/?engine=default%2Fllama-1%2Fvllm" in page
        assert "default/llama-3" in page
        assert "default/llama-2" in self.ask("/", "engine=default/llama-2").text

    def test_the_metrics_page_has_every_engine(self) -> None:
        page = self.ask("/metrics").text

        assert 'headroom_engine_requests_running{container="vllm",engine="0",model_name="m2"' in page
        assert 'headroom_engines{kind="own_sidecar"} 1.0' in page
        assert page.count("# TYPE headroom_engine_requests_running gauge") == 1


def test_the_state_folder_of_a_pod_is_by_its_uid_and_can_be_read_by_people() -> None:
    assert name_folder(*list_folder_parts(locate(1))) == "engine-default_llama-1_uid-1_8000"
    hostile = EngineName(engine_url="http://h:1/../../etc?x")
    located = LocatedEngine(kind=EngineKind.WATCHED, key="", owner_key="", name=hostile)
    assert name_folder(*list_folder_parts(located)) == "engine-h-1-..-..-etc-x_0"


def test_only_old_folders_of_engines_that_are_gone_are_removed(tmp_path: Path) -> None:
    names = [name_folder(f"e{number:02d}") for number in range(MOST_UNUSED + 3)]
    for number, name in enumerate((*names, "other")):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (number, number))

    remove_unused(tmp_path, {names[0]})
    remaining = {path.name for path in tmp_path.iterdir()}
    assert remaining == {names[0], *names[3:], "other"}

    for number in range(MOST_RECENT + 2):
        (tmp_path / name_folder(f"recent{number:02d}")).mkdir()
        seconds = time.time() - 60 + number / 2
        os.utime(tmp_path / name_folder(f"recent{number:02d}"), (seconds, seconds))
    remove_unused(tmp_path, set())
    recent_names = {name_folder(f"recent{number:02d}") for number in range(2, MOST_RECENT + 2)}
    assert {path.name for path in tmp_path.iterdir()} == {*recent_names, "other"}


def test_a_folder_of_this_week_is_kept_though_more_than_the_newest_are_older(tmp_path: Path) -> None:
    names = [name_folder(f"e{number:02d}") for number in range(MOST_UNUSED + 3)]
    for number, name in enumerate(names[3:]):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (number, number))
    (tmp_path / name_folder("new")).mkdir()
    os.utime(tmp_path / names[3])
    remove_unused(tmp_path, set())
    assert (tmp_path / names[3]).exists()
