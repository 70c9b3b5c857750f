from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.derive.attribution_ticks import (
    AUTO,
    GIB,
    MIB,
    MIDDLE_DRIVER,
    NO_PROC,
    device,
    engine,
    gpus,
    last,
    ledger,
)
from vllm_headroom.derive.attribution import Selection
from vllm_headroom.model import Failure, GpuMemory, GpuProcess, GpuReadings, ProcessReadings

Tick = tuple[GpuReadings, ProcessReadings | Failure]
UP: Tick = (gpus(device(0, (7, 3), (99, 5))), engine(7, visible=(99,)))


def list_held_bytes(*ticks: Tick, selection: Selection = AUTO) -> list[int | None]:
    return [gpu.held_bytes for gpu in last(*ticks, selection=selection)]


def test_the_ledger_leaves_pids_that_do_not_show_unattributed() -> None:
    readings = gpus(device(0, (7, 3), (8, 4), (99, 5), (12345, 6)))
    (gpu,) = last((readings, engine(7, 8, visible=(99,))))

    assert (gpu.engine_bytes, gpu.other_bytes) == (7, 5)
    assert gpu.held_bytes == 7
    assert gpu.process_count == 4


def test_the_ledger_covers_devices_that_are_not_the_engines() -> None:
    seen_gpus = last((gpus(device(0, (7, 3)), device(1, (99, 5))), engine(7, visible=(99,))))

    assert ledger(seen_gpus) == [(3, 0), (0, 5)]


def test_an_engine_that_has_gone_holds_nothing() -> None:
    readings = gpus(device(0, (99, 5)))
    (gpu,) = last((gpus(device(0, (7, 3))), engine(7)), (readings, engine(visible=(99,))))

    assert (gpu.engine_bytes, gpu.other_bytes, gpu.held_bytes) == (0, 5, 0)


@pytest.mark.parametrize("processes", [engine(visible=(99,)), engine(7, visible=(99,)), NO_PROC])
def test_before_the_engine_was_seen_on_a_device_nothing_is_known(processes: ProcessReadings | Failure) -> None:
    (gpu,) = last((gpus(device(0, (99, 5))), processes))

    assert (gpu.engine_bytes, gpu.other_bytes) == (None, None)
    assert gpu.held_bytes == 80 * GIB
    assert gpu.process_count == 1


@pytest.mark.parametrize(
    "blind",
    [
        (gpus(device(0, (7, 3))), NO_PROC),
        (gpus(device(0, listed=False)), engine(7)),
        (gpus(device(0, (7, 3), memory=False)), engine(7)),
    ],
    ids=["no /proc", "no process list", "no memory info"],
)
def test_what_was_known_is_not_kept(blind: Tick) -> None:
    assert ledger(last((gpus(device(0, (7, 3))), engine(7)), blind)) == [(None, None)]


@pytest.mark.parametrize(
    "blind",
    [
        (UP[0], NO_PROC),
        (gpus(device(0, listed=False)), UP[1]),
        (gpus(device(0, (7, 3), memory=False)), UP[1]),
        (gpus(device(0, (7, None), (99, 5))), UP[1]),
        (gpus(device(0, (7, GIB), used=GIB // 2)), UP[1]),
        (gpus(device(0, (7, 3)), driver=None), UP[1]),
        (UP[0], engine(visible=(7, 99), ambiguous=2)),
    ],
    ids=["no /proc", "no list", "no memory info", "not told for a pid", "race", "no driver version", "two engines"],
)
def test_what_becomes_unknown_for_a_moment_is_never_taken_for_the_engines(blind: Tick) -> None:
    assert list_held_bytes(UP, blind) == [None]
    assert list_held_bytes(UP, blind, UP) == [3]


@pytest.mark.parametrize("listed", [True, False])
def test_a_reading_that_opens_the_ledger_opens_it_for_every_device(*, listed: bool) -> None:
    readings = gpus(device(0, (7, 3)), device(1, listed=listed))

    assert list_held_bytes((readings, engine(7)), selection=Selection(everything=True)) == [3, 0 if listed else None]


def test_an_excess_is_unknown_from_the_first_reading_on() -> None:
    assert list_held_bytes((gpus(device(0, (7, GIB), used=GIB // 2)), engine(7))) == [None]


@pytest.mark.parametrize(
    "tick",
    [
        (gpus(device(0)), NO_PROC),
        (gpus(device(0, (7, 3))), engine()),
        (gpus(device(0, (7, 3)), driver=MIDDLE_DRIVER), engine(7)),
        (gpus(device(0, (7, None), (99, None))), engine(7, visible=(99,))),
    ],
    ids=["no /proc", "a PID namespace of its own", "a driver that mistakes memory", "a driver that never tells"],
)
def test_all_that_is_used_counts_where_the_ledger_cannot_be_known(tick: Tick) -> None:
    assert list_held_bytes(tick, tick) == [80 * GIB]


def test_of_memory_that_is_the_machines_what_nobody_is_known_to_hold_is_not_the_engines() -> None:
    shared = replace(
        device(0),
        memory=GpuMemory(
            total_bytes=100 * GIB,
            used_bytes=40 * GIB,
            free_bytes=60 * GIB,
            reserved_bytes=None,
            machine_available_bytes=60 * GIB,
        ),
    )

    assert list_held_bytes((gpus(shared), NO_PROC)) == [None]
    assert list_held_bytes((gpus(replace(shared, processes=(GpuProcess(pid=7, used_bytes=3 * GIB),))), engine(7))) == [
        3 * GIB
    ]


def test_what_others_are_known_to_hold_does_not_count() -> None:
    tick = (gpus(device(0, (7, None), (99, GIB))), engine(7, visible=(99,)))

    assert list_held_bytes(tick) == [79 * GIB]


def test_a_device_that_is_not_the_engines_is_not_held() -> None:
    assert list_held_bytes((gpus(device(0, (7, 3)), device(1, (99, 5))), engine(7, visible=(99,)))) == [3, None]


@pytest.mark.parametrize("selection", [AUTO, Selection(listed=("0",)), Selection(everything=True)])
def test_while_the_engine_cannot_be_distinguished_from_another_one_nothing_is_known(selection: Selection) -> None:
    tick = (gpus(device(0, (7, 3), (8, 4))), engine(visible=(7, 8), ambiguous=2))
    (gpu,) = last(tick, selection=selection)

    assert (gpu.engine_bytes, gpu.other_bytes, gpu.held_bytes) == (None, None, None)
    assert ledger(last(UP, tick, selection=selection)) == [(None, None)]
    assert list_held_bytes(tick, (tick[0], NO_PROC), selection=selection) == [None]
    assert list_held_bytes(tick, (tick[0], engine()), selection=selection) == [80 * GIB]


def test_a_list_that_cannot_be_read_has_no_count_and_an_empty_one_has_none_in_it() -> None:
    assert [gpu.process_count for gpu in last((gpus(device(0, listed=False), device(1)), NO_PROC))] == [None, 0]


@pytest.mark.parametrize(
    ("engine_holds", "other_holds", "expected"),
    [(None, 5, (None, 5)), (3, None, (3, None)), (None, None, (None, None)), (None, 10 * MIB, (None, 10 * MIB))],
)
def test_memory_the_driver_does_not_tell_makes_that_side_unknown(
    engine_holds: int | None, other_holds: int | None, expected: tuple[int | None, int | None]
) -> None:
    readings = gpus(device(0, (7, engine_holds), (8, 0), (99, other_holds)))

    assert ledger(last((readings, engine(7, 8, visible=(99,))))) == [expected]


@pytest.mark.parametrize(
    ("engine_holds", "other_holds", "expected"),
    [
        (GIB, 0, (GIB, 0)),
        (GIB + 64 * MIB, 0, (GIB, 0)),
        (GIB + 64 * MIB + 1, 0, (None, None)),
        (GIB - MIB, 3 * MIB, (GIB - MIB, MIB)),
        (GIB + MIB, 3 * MIB, (GIB, 0)),
        (GIB - MIB, 66 * MIB, (None, None)),
        (None, GIB + MIB, (None, GIB)),
        (None, GIB + 65 * MIB, (None, None)),
    ],
)
def test_a_small_excess_is_a_race_and_a_large_one_another_namespace(
    engine_holds: int | None, other_holds: int, expected: tuple[int | None, int | None]
) -> None:
    readings = gpus(device(0, (7, engine_holds), (99, other_holds), used=GIB))

    assert ledger(last((readings, engine(7, visible=(99,))))) == [expected]


HOLDERS = st.lists(st.tuples(st.integers(1, 9), st.none() | st.integers(0, 96 * GIB)), max_size=6)
DEVICES = st.lists(st.tuples(HOLDERS, st.integers(0, 96 * GIB)), max_size=3)
PROCESSES = st.builds(engine, st.integers(1, 4), st.integers(1, 4), visible=st.just((5, 6, 7)), host=st.booleans())
TICKS = st.lists(st.tuples(DEVICES, PROCESSES | st.just(NO_PROC)), min_size=1, max_size=4)


@given(ticks=TICKS, listed=st.lists(st.sampled_from(["0", "GPU-1"])).map(tuple))
def test_the_ledger_is_never_negative_nor_above_what_is_used(
    ticks: list[tuple[list[tuple[list[tuple[int, int | None]], int]], ProcessReadings | Failure]],
    listed: tuple[str, ...],
) -> None:
    readings = [
        (gpus(*(device(index, *holders, used=used) for index, (holders, used) in enumerate(devices))), processes)
        for devices, processes in ticks
    ]

    for gpu in last(*readings, selection=Selection(listed=listed)):
        engine_bytes, other_bytes = gpu.engine_bytes or 0, gpu.other_bytes or 0
        assert gpu.reading.memory is not None
        assert 0 <= engine_bytes <= engine_bytes + other_bytes <= gpu.reading.memory.used_bytes
        assert gpu.held_bytes is None or engine_bytes <= gpu.held_bytes <= gpu.reading.memory.used_bytes - other_bytes


def test_what_a_run_left_behind_is_the_engines_until_it_has_gone() -> None:
    running_tick = (gpus(device(0, (11, 60 * GIB), used=60 * GIB)), engine(10, 11, host=True))
    orphaned_tick = (gpus(device(0, (11, 60 * GIB), used=60 * GIB)), engine(10, orphans=(11,), host=True))
    again = (gpus(device(0, (11, 60 * GIB), (21, 9 * GIB), used=69 * GIB)), engine(20, 21, orphans=(11,), host=True))
    restarted_tick = (gpus(device(0, (21, 9 * GIB), used=9 * GIB)), engine(20, 21, host=True))

    ledger_rows = [
        (gpu.engine_bytes, gpu.other_bytes)
        for at in range(1, 5)
        for gpu in last(*(running_tick, orphaned_tick, again, restarted_tick)[:at])
    ]

    assert ledger_rows == [(60 * GIB, 0), (60 * GIB, 0), (69 * GIB, 0), (9 * GIB, 0)]
