"""What grows in the engine's processes: read rarely, one at a time, beside the loop, and in the incident."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.command import read_data, run_command
from tests.fakes.leaks import build_leaks
from tests.logs import capture_logs
from tests.samples import gpu
from tests.unit.daemon.state.engine import free
from tests.unit.derive.life.watch import BEGAN, REFUSED, UNSEEN, WHOLE, WORKER, Watch, process, serving
from vllm_headroom import catalog
from vllm_headroom.daemon.flight import Flight
from vllm_headroom.daemon.mappings import MOST_MAPPED_PROCESSES, REREAD_SECONDS, Mappings
from vllm_headroom.derive.series import make_states
from vllm_headroom.model import EngineProcess, Failure, Snapshot, Values
from vllm_headroom.scrape.proc.smaps import read_mappings
from vllm_headroom.vocabulary import LeakState, Role

MIB = 2**20
STABLE = Values(())
GROWING = Values(make_states(catalog.HOST_LEAK_STATE, (str(Role.WORKER),), LeakState.GROWING))


def make_snapshot(at: float, processes: tuple[EngineProcess, ...] | Failure = WHOLE) -> Snapshot:
    watch = serving()
    assert watch.seen is not None
    return replace(watch.seen, monotonic_seconds=at, time_seconds=BEGAN + at, processes=processes)


async def settle(subject: Mappings) -> None:
    """Wait for the reading that has begun."""
    if subject._running is not None:
        await asyncio.wait([subject._running[1]])


def run(subject: Mappings, *steps: tuple[Snapshot, Values]) -> list[dict[str, Any]]:
    async def play() -> None:
        for snapshot, values in steps:
            subject.step(snapshot, values)
            await settle(subject)

    with capture_logs() as lines:
        asyncio.run(play())
    return [dict(line) for line in lines]


class Kernel:
    """The mappings of processes, which grow by each reading."""

    def __init__(self, *, unreadable: int | None = None) -> None:
        self.read: list[int] = []
        self._unreadable = unreadable

    def __call__(self, pid: int) -> dict[str, int] | None:
        self.read.append(pid)
        return None if pid == self._unreadable else {"heap": self.read.count(pid) * 64 * MIB, "libc.so.6": MIB}


def test_each_process_is_read_once_and_a_growing_one_again_in_ten_minutes() -> None:
    kernel = Kernel()
    subject = Mappings(kernel)
    run(subject, *((make_snapshot(5.0 * tick), STABLE) for tick in range(300)))
    assert sorted(kernel.read) == [10, 11, 12]
    assert subject.describe() == []

    result = run(
        subject, *((make_snapshot(2000 + 5.0 * tick), GROWING) for tick in range(1 + 2 * int(REREAD_SECONDS / 5)))
    )

    assert kernel.read[3:] == [WORKER.pid] * 2
    (grown,) = subject.describe()
    assert grown | {"since": None} == {
        "pid": WORKER.pid,
        "role": "worker",
        "since": None,
        "t": BEGAN + 2000 + REREAD_SECONDS + 10,
        "kinds": {"heap": 2 * 64 * MIB},
    }
    assert BEGAN <= grown["since"] <= BEGAN + 20
    (line,) = result
    assert (line["process"], line["pid"], line["grown"]) == ("worker", WORKER.pid, "64 MiB heap")


def test_a_process_that_cannot_be_read_costs_itself_alone() -> None:
    kernel = Kernel(unreadable=WORKER.pid)
    subject = Mappings(kernel)
    run(subject, *((make_snapshot(5.0 * tick), GROWING) for tick in range(200)))

    assert sorted(kernel.read) == [10, 11, 12, 12], "and not at each tick"
    assert subject.describe() == []


def test_a_later_reading_that_fails_leaves_the_earlier_growth() -> None:
    kernel = Kernel()
    subject = Mappings(kernel)
    run(subject, *((make_snapshot(400.0 * tick), GROWING) for tick in range(8)))
    described = subject.describe()
    assert [growth["pid"] for growth in described] == [WORKER.pid]

    kernel._unreadable = WORKER.pid
    run(subject, *((make_snapshot(4000 + 400.0 * tick), GROWING) for tick in range(4)))
    assert subject.describe() == described


def test_a_reading_that_raises_is_none() -> None:
    def read(_pid: int) -> dict[str, int]:
        raise OSError("gone")

    subject = Mappings(read)
    run(subject, *((make_snapshot(400.0 * tick), GROWING) for tick in range(6)))
    assert subject.describe() == []


def test_a_reading_that_hangs_holds_up_nothing() -> None:
    hangs, has_begun = threading.Event(), threading.Event()

    def read(_pid: int) -> None:
        has_begun.set()
        hangs.wait(60)

    async def play() -> None:
        subject = Mappings(read)
        for tick in range(50):
            subject.step(make_snapshot(5.0 * tick), GROWING)
        assert has_begun.wait(60)
        assert subject.describe() == []
        hangs.set()
        await settle(subject)

    asyncio.run(play())


def test_what_was_read_of_a_pid_that_is_another_process_now_is_dropped() -> None:
    kernel = Kernel()
    subject = Mappings(kernel)
    old, new = process(5, Role.WORKER), process(5, Role.WORKER, started=BEGAN + 700)
    ticks = ((0.0, old), (5.0, new), (10.0, new), (2000.0, new), (2005.0, new))
    run(subject, *((make_snapshot(at, (ticked_process,)), GROWING) for at, ticked_process in ticks))

    assert kernel.read == [5, 5, 5]
    assert [growth["kinds"] for growth in subject.describe()] == [{"heap": 64 * MIB}], "from its own first reading"


def test_nothing_is_read_before_the_engine_serves_or_where_its_processes_are_not_visible() -> None:
    kernel, watch = Kernel(), Watch()
    watch.look(REFUSED)
    assert watch.seen is not None
    run(
        Mappings(kernel),
        (watch.seen, GROWING),
        (make_snapshot(5.0, UNSEEN), GROWING),
        (make_snapshot(10.0, ()), GROWING),
    )

    assert kernel.read == []


def test_of_many_processes_the_largest_are_read() -> None:
    kernel = Kernel()
    many_processes = tuple(replace(process(100 + number, Role.WORKER), rss_bytes=number) for number in range(100))
    run(Mappings(kernel), *((make_snapshot(5.0 * tick, many_processes), STABLE) for tick in range(150)))

    assert sorted(kernel.read) == list(range(200 - MOST_MAPPED_PROCESSES, 200))


@pytest.mark.parametrize(("way", "kind"), [("malloc", "heap"), ("memfd", "memfd")])
def test_the_incident_and_the_postmortem_name_what_a_real_process_leaked(tmp_path: Path, way: str, kind: str) -> None:
    leaks = build_leaks(tmp_path)
    with subprocess.Popen([leaks, way, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as leaking:
        assert leaking.stdin is not None
        assert leaking.stdout is not None
        mappings = Mappings(lambda pid: read_mappings(Path("/proc"), pid))
        subject = Flight(folder=tmp_path, lines=tuple, version="1", lock=free(), mappings=mappings)
        watch = serving()
        worker = replace(WORKER, pid=leaking.pid)

        async def play() -> None:
            assert leaking.stdin is not None
            assert leaking.stdout is not None
            for tick in range(4):
                if tick == 1:
                    leaking.stdin.write("\n" * 4)
                    leaking.stdin.flush()
                    assert [leaking.stdout.readline() for _ in range(4)] == ["done\n"] * 4
                assert watch.seen is not None
                at = watch.seen.monotonic_seconds + tick * REREAD_SECONDS
                await subject.step(replace(watch.seen, monotonic_seconds=at, processes=(worker,)), (), GROWING)
                await settle(mappings)
            watch.look(REFUSED, processes=(), gpus=(gpu(used=0, total=80 * 2**30),))
            assert watch.seen is not None
            await subject.step(replace(watch.seen, monotonic_seconds=9000.0), (), STABLE)

        asyncio.run(play())
        leaking.stdin.close()

    done = run_command("postmortem", str(tmp_path), "--json")
    (grown,) = read_data(done.stdout)["known"]["before"]["mappings"]
    assert (grown["pid"], grown["role"]) == (leaking.pid, "worker")
    name, size = next(iter(grown["kinds"].items()))
    assert (name, 60 * MIB <= size <= 68 * MIB) == (kind, True)
    text = run_command("postmortem", str(tmp_path)).stdout
    assert f"host growth    worker pid {leaking.pid}" in text
    assert f"MiB in {kind}" in text
