"""GPU memory of what serves no engine any more: only what is sure, and never another's."""

from __future__ import annotations

from typing import Final

import pytest
from msgspec.structs import replace

from tests.unit.derive.attribution_ticks import GIB, MIDDLE_DRIVER, OLD_DRIVER, device, engine, gpus, last
from vllm_headroom.derive.attribution import describe_leftover, describe_orphans
from vllm_headroom.model import Fate, Gpu, Leftover, ProcessReadings

BEFORE: Final = (gpus(device(0, (7, 5 * GIB), (99, GIB), used=6 * GIB)), engine(7, visible=(1, 99)))
ALL_SEEN: Final = engine(visible=(1, 99), host=True)


def after(processes: ProcessReadings) -> Gpu:
    """Return the GPU when the engine of before has ended and NVML lists it still."""
    return last(BEFORE, (BEFORE[0], processes))[0]


@pytest.mark.parametrize(
    ("processes", "fate"),
    [
        (engine(visible=(1, 99), orphans=(7,)), Fate.ORPHANED),
        (replace(engine(visible=(1, 7, 99)), zombies=frozenset({7})), Fate.ZOMBIE),
        (engine(visible=(1, 99)), Fate.VANISHED),
    ],
)
def test_what_ended_with_memory_is_reported_and_stays_the_engines(processes: ProcessReadings, fate: Fate) -> None:
    gpu = after(processes)

    assert gpu.leftovers == (Leftover(pid=7, fate=fate, used_bytes=5 * GIB),)
    assert (gpu.engine_bytes, gpu.other_bytes) == (5 * GIB, GIB)


def test_an_engine_that_runs_and_its_neighbour_leave_nothing() -> None:
    assert last(BEFORE)[0].leftovers == ()
    assert last(BEFORE, BEFORE)[0].leftovers == ()


def test_a_pid_that_is_used_again_is_another_process_for_good() -> None:
    again = (BEFORE[0], engine(visible=(1, 7, 99)))

    assert last(BEFORE, again)[0].leftovers == ()
    assert last(BEFORE, again, (BEFORE[0], engine(visible=(1, 99))))[0].leftovers == ()


def test_what_nobody_saw_alive_is_missed_where_all_processes_show_and_nowhere_else() -> None:
    listed = gpus(device(0, (55, 5 * GIB), (99, GIB), used=6 * GIB))

    assert [leftover.fate for leftover in last((listed, ALL_SEEN))[0].leftovers] == [Fate.VANISHED]
    assert last((listed, engine(visible=(1, 99))))[0].leftovers == ()
    assert last((listed, engine(visible=(99,), host=True)))[0].leftovers == (), "without pid 1 others are hidden"


def test_a_core_whose_server_nobody_saw_is_left_behind_and_not_this_engines() -> None:
    process_readings = replace(engine(7, visible=(1, 8)), strays=frozenset({8}))
    (gpu,) = last((gpus(device(0, (7, 5 * GIB), (8, GIB), used=6 * GIB)), process_readings))

    assert gpu.leftovers == (Leftover(pid=8, fate=Fate.ORPHANED, used_bytes=GIB),)
    assert (gpu.engine_bytes, gpu.other_bytes) == (5 * GIB, GIB)


def test_memory_of_a_process_that_is_exiting_stays_the_engines_and_is_no_leftover() -> None:
    exiting = replace(engine(visible=(1, 7, 99)), exiting=frozenset({7}))
    zombie = replace(engine(visible=(1, 7, 99)), zombies=frozenset({7}))

    gpu = after(exiting)
    assert (gpu.engine_bytes, gpu.other_bytes, gpu.leftovers) == (5 * GIB, GIB, ())

    (gpu,) = last(BEFORE, (BEFORE[0], exiting), (BEFORE[0], zombie))
    assert (gpu.engine_bytes, gpu.other_bytes) == (5 * GIB, GIB)


def test_a_zombie_is_nobodys_neighbour() -> None:
    process_readings = replace(engine(7, visible=(1, 55)), zombies=frozenset({55}))
    (gpu,) = last((gpus(device(0, (7, 5 * GIB), (55, GIB), used=6 * GIB)), process_readings))

    assert (gpu.engine_bytes, gpu.other_bytes) == (5 * GIB, 0)


def test_where_pids_or_their_memory_are_not_reported_truly_neither_is_this() -> None:
    orphaned_readings = engine(visible=(1,), orphans=(7,))

    assert last((gpus(device(0, (7, GIB)), driver=OLD_DRIVER), orphaned_readings))[0].leftovers == ()
    (leftover,) = last((gpus(device(0, (7, GIB)), driver=MIDDLE_DRIVER), orphaned_readings))[0].leftovers
    assert leftover == Leftover(pid=7, fate=Fate.ORPHANED, used_bytes=None)


def test_it_is_said_with_what_to_do() -> None:
    orphan = Leftover(pid=4711, fate=Fate.ORPHANED, used_bytes=5 * GIB)

    assert describe_leftover(orphan) == (
        "5 GiB held by pid 4711, left behind by an engine that has ended: end it with kill 4711, or kill -9 4711"
    )
    assert describe_leftover(replace(orphan, pid=0, used_bytes=None)) == (
        "an unknown share held by a process left behind by an engine that has ended: end it with kill PID, or kill -9"
        " PID"
    )
    assert "no signal helps" in describe_leftover(replace(orphan, fate=Fate.ZOMBIE))
    assert "until the GPU is reset" in describe_leftover(replace(orphan, fate=Fate.VANISHED))


def test_what_is_on_no_gpu_that_is_reported_is_named_by_its_pids() -> None:
    (gpu,) = last(BEFORE, (BEFORE[0], engine(visible=(1, 99), orphans=(7,))))

    assert describe_orphans(frozenset({7}), (gpu,)) is None
    assert describe_orphans(frozenset({7, 8}), (gpu,)) == (
        "pid 8 is left behind by an engine that has ended: end it with kill 8, or kill -9 8"
    )
    assert describe_orphans(frozenset({10, 8}), ()) == (
        "pids 8, 10 are left behind by an engine that has ended: end it with kill 8 10, or kill -9 8 10"
    )


def test_a_pid_that_was_on_no_device_of_the_engine_is_not_left_over() -> None:
    """The engine's process 8 uses no GPU; later an unknown process has its pid."""
    ticks = (
        (gpus(device(0, (7, GIB))), engine(7, 8)),
        (gpus(device(0, (7, GIB), (8, GIB))), engine(7)),
    )

    assert last(*ticks)[0].leftovers == ()
