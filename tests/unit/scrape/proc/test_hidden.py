"""A /proc in which the engine could not show is a failed source, not one that shows no engine."""

from __future__ import annotations

import asyncio

from tests.fakes.proc_tree import ProcTree
from tests.unit.scrape.proc.engines import SERVER, Clock
from vllm_headroom.model import Failure, ProcessReadings
from vllm_headroom.scrape.proc.reader import HIDDEN, Processes


def reader(tree: ProcTree, *, engine_is_here: bool = True) -> Processes:
    return Processes(engine_port=8000, engine_is_here=engine_is_here, proc=tree.path, monotonic=Clock())


def read(processes: Processes) -> ProcessReadings | Failure:
    return asyncio.run(processes.read(30))


def test_where_only_the_daemons_own_line_shows_the_engine_is_hidden(tree: ProcTree) -> None:
    processes = reader(tree)
    assert read(processes) == HIDDEN

    tree.add(5, 9999, "a child of the daemon's")
    assert read(processes) == HIDDEN
    tree.add(6, 0, "/pause")
    assert isinstance(read(processes), ProcessReadings)


def test_where_the_first_process_is_hidden_so_is_the_engine(tree: ProcTree) -> None:
    tree.add(6, 0, "sh")
    tree.remove(1)

    assert read(reader(tree)) == HIDDEN


def test_an_engine_that_shows_is_not_hidden_whatever_else_is(tree: ProcTree) -> None:
    tree.add(7, 6, *SERVER)
    tree.remove(1)

    assert isinstance(read(reader(tree)), ProcessReadings)


def test_an_engine_that_showed_and_left_nothing_beside_the_daemon_is_gone(tree: ProcTree) -> None:
    """As where one container runs both."""
    tree.add(7, 1, *SERVER)
    processes = reader(tree)
    assert isinstance(read(processes), ProcessReadings)

    tree.remove(7)
    readings = read(processes)

    assert isinstance(readings, ProcessReadings)
    assert readings.engine == ()


def test_an_engine_that_showed_is_hidden_when_the_first_process_is_too(tree: ProcTree) -> None:
    """As /proc mounted again with hidepid does."""
    tree.add(7, 1, *SERVER)
    processes = reader(tree)
    assert isinstance(read(processes), ProcessReadings)

    for pid in (1, 7):
        tree.remove(pid)

    assert read(processes) == HIDDEN


def test_an_engine_on_another_machine_is_not_hidden(tree: ProcTree) -> None:
    assert isinstance(read(reader(tree, engine_is_here=False)), ProcessReadings)


def test_what_to_do_is_reported() -> None:
    assert "shareProcessNamespace: true" in HIDDEN.message
    assert "hidepid" in HIDDEN.message
