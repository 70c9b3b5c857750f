from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fakes.proc_tree import BOOT_SECONDS, TICKS, ProcTree
from tests.unit.scrape.proc.engines import SERVER, Clock, read, roles
from vllm_headroom.scrape.proc import files
from vllm_headroom.scrape.proc.files import ProcEntry
from vllm_headroom.scrape.proc.reader import Processes
from vllm_headroom.vocabulary import Role


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def processes(tree: ProcTree, clock: Clock) -> Processes:
    return Processes(engine_port=8000, proc=tree.path, monotonic=clock)


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the pids whose files are read from now on."""
    pids: list[int] = []
    read_entry = files.read_entry

    def entry(proc: Path, pid: int, previous: ProcEntry | None = None, *, is_engine: bool = False) -> ProcEntry | None:
        pids.append(pid)
        return read_entry(proc, pid, previous, is_engine=is_engine)

    monkeypatch.setattr(files, "read_entry", entry)
    return pids


def test_a_new_process_is_seen_at_once(tree: ProcTree, processes: Processes) -> None:
    tree.add(7, 1, *SERVER)
    read(processes)
    tree.add(8, 7, "VLLM::EngineCore")

    assert roles(processes) == {7: Role.API_SERVER, 8: Role.ENGINE_CORE}


def test_a_title_that_comes_late_is_seen_within_the_time_of_a_scan(
    tree: ProcTree, processes: Processes, clock: Clock
) -> None:
    tree.add(7, 1, *SERVER)
    tree.add(8, 7, *SERVER)
    read(processes)
    tree.add(8, 7, "VLLM::EngineCore")
    roles_before = roles(processes)
    for clock.seconds in (5.0, 10.0, 15.0):
        roles_after = roles(processes)

    assert (roles_before[8], roles_after[8]) == (Role.OTHER, Role.ENGINE_CORE)


def test_a_reading_looks_again_at_a_share_of_the_processes_only(
    tree: ProcTree, processes: Processes, clock: Clock, looked: list[int]
) -> None:
    for pid in range(100, 160):
        tree.add(pid, 1, "sleep")
    read(processes)
    looked.clear()
    for clock.seconds in (5.0, 10.0, 15.0):
        old_count = len(looked)
        read(processes)
        assert 20 <= len(looked) - old_count <= 22

    assert set(range(100, 160)) <= set(looked)


def test_the_kernels_own_threads_are_looked_at_once(
    tree: ProcTree, processes: Processes, clock: Clock, looked: list[int]
) -> None:
    """In a container pid 2 is a process like any other, and so are its children."""
    for name, again in (("kthreadd", {1, 2}), ("sleep", {1, 2, 20, 21})):
        for pid, parent, called in ((2, 0, name), (20, 2, "kworker/0:0"), (21, 2, "ksoftirqd/0")):
            tree.add(pid, parent, called, name=called)
            (tree.path / str(pid) / "cmdline").write_bytes(b"")
        clock.seconds += 15.0
        read(processes)
        looked.clear()
        clock.seconds += 15.0
        read(processes)

        assert {1, 2, 20, 21} & set(looked) == again


def test_a_stranger_under_the_engines_name_takes_nothing_away(tree: ProcTree, processes: Processes) -> None:
    tree.add(7, 1, *SERVER)
    read(processes)
    tree.add(8, 1, *SERVER)
    tree.add(9, 8, "VLLM::EngineCore")
    readings = read(processes)

    assert [process.pid for process in readings.engine] == [7]
    assert readings.ambiguous_engines == 0


def test_a_process_that_has_gone_makes_a_scan(tree: ProcTree, processes: Processes) -> None:
    tree.add(7, 1, *SERVER)
    tree.add(8, 7, *SERVER)
    tree.add(9, 7, "VLLM::Worker")
    read(processes)
    tree.add(8, 7, "VLLM::EngineCore")
    tree.remove(9)

    assert roles(processes) == {7: Role.API_SERVER, 8: Role.ENGINE_CORE}


def test_a_neighbour_is_not_taken_while_the_engine_is_down(tree: ProcTree, processes: Processes) -> None:
    tree.add(7, 1, *SERVER)
    tree.add(8, 1, *SERVER, "--port", "9000")
    roles_before = roles(processes)
    tree.remove(7)
    down = roles(processes)
    tree.add(9, 1, *SERVER)

    assert (roles_before, down, roles(processes)) == ({7: Role.API_SERVER}, {}, {9: Role.API_SERVER})


def test_engines_are_distinguished_as_soon_as_they_can_be(tree: ProcTree, processes: Processes) -> None:
    tree.add(7, 1, *SERVER)
    tree.add(8, 1, *SERVER)
    old_reading = read(processes)
    tree.remove(8)
    new_reading = read(processes)

    assert (old_reading.ambiguous_engines, new_reading.ambiguous_engines) == (2, 0)
    assert [process.pid for process in new_reading.engine] == [7]


def test_a_zombie_makes_no_scan(tree: ProcTree, processes: Processes) -> None:
    tree.add(7, 1, *SERVER)
    tree.add(8, 7, *SERVER)
    tree.add(9, 7, name="gcc", state="Z", rss_pages=0)
    read(processes)
    tree.add(8, 7, "VLLM::EngineCore")

    assert roles(processes)[8] is Role.OTHER  # not yet looked at again


@pytest.mark.parametrize("command", [("nginx",), ("vllm", "serve")])
def test_a_pid_that_is_used_again_is_another_process(
    tree: ProcTree, processes: Processes, command: tuple[str, ...]
) -> None:
    tree.add(7, 1, *SERVER, started_ticks=1 * TICKS)
    read(processes)
    tree.add(7, 1, *command, started_ticks=2 * TICKS)

    started = [process.started_at_seconds for process in read(processes).engine]

    assert started == ([BOOT_SECONDS + 2] if "vllm" in command else [])


def test_a_step_of_the_clock_moves_no_start_time(tree: ProcTree, processes: Processes) -> None:
    tree.add(7, 1, *SERVER)
    old_reading = read(processes)
    (tree.path / "stat").write_text(f"btime {BOOT_SECONDS + 3600}\n")

    assert read(processes) == old_reading


COMMANDS = (SERVER, ("bash", "/start.sh"), ("nginx",), ("VLLM::EngineCore",), ("VLLM::Worker_TP0",), ("sleep", "9"))


class EagerProcesses(Processes):
    """Chooses the engine again whenever any process has changed."""

    def _may_concern_engine(self, _process: ProcEntry) -> bool:
        return True


@pytest.mark.parametrize("seed", range(4))
def test_a_change_that_concerns_no_engine_changes_nothing(tree: ProcTree, seed: int) -> None:
    """Processes start, exit, get another title or another parent, at random."""
    chance = random.Random(seed)  # noqa: S311 - not for cryptography
    lazy = Processes(engine_port=8000, proc=tree.path, monotonic=lambda: 0.0, rescan_seconds=0)
    eager = EagerProcesses(engine_port=8000, proc=tree.path, monotonic=lambda: 0.0, rescan_seconds=0)
    parents: dict[int, int] = {}
    for step in range(40):
        if len(parents) > 6 or (parents and chance.random() < 0.3):
            pid = chance.choice(sorted(parents))
            del parents[pid]
            tree.remove(pid)
            for child_pid in [child_pid for child_pid, parent_pid in parents.items() if parent_pid == pid]:
                parents[child_pid] = 1
                tree.add(child_pid, 1, *chance.choice(COMMANDS))
        pid = chance.randrange(10, 20)
        parents[pid] = chance.choice([1, *(parent_pid for parent_pid in parents if parent_pid < pid)])
        tree.add(pid, parents[pid], *chance.choice(COMMANDS), group=chance.choice((1, pid)), started_ticks=step)

        assert read(lazy) == read(eager)


def test_a_program_above_an_engine_that_becomes_another_one_is_noticed(tree: ProcTree) -> None:
    """A shell adopts what an exited engine has left behind."""
    subject = Processes(engine_port=8000, proc=tree.path, monotonic=lambda: 0.0, rescan_seconds=0)
    tree.add(7, 1, *SERVER)
    tree.add(8, 1, "python", "embed.py", group=8)
    tree.add(9, 8, "VLLM::EngineCore", group=8)
    assert not read(subject).strays
    tree.add(10, 1, "nginx")
    assert not read(subject).strays

    tree.add(8, 1, "bash", group=8)

    assert read(subject).strays == {9}


def test_a_process_of_no_engine_does_not_make_the_engine_be_chosen_again(
    tree: ProcTree, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.add(7, 1, *SERVER)
    assert roles(processes) == {7: Role.API_SERVER}
    tree.add(9, 1, "nginx")
    assert roles(processes) == {7: Role.API_SERVER}

    monkeypatch.setattr(processes, "_find_engine", lambda: pytest.fail("it was chosen again"))
    tree.add(8, 1, "nginx")
    assert roles(processes) == {7: Role.API_SERVER}
    tree.remove(8)
    assert roles(processes) == {7: Role.API_SERVER}
