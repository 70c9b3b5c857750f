from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unit.derive.attribution_ticks import (
    GIB,
    MIB,
    MIDDLE_DRIVER,
    NEW_DRIVER,
    NO_PROC,
    OLD_DRIVER,
    device,
    engine,
    gpus,
    last,
    ledger,
)
from vllm_headroom.derive.attribution import Selection
from vllm_headroom.model import Failure, Gpu, GpuReading, GpuReadings, ProcessReadings
from vllm_headroom.vocabulary import Attribution


def attributions(seen_gpus: tuple[Gpu, ...]) -> list[Attribution | None]:
    return [gpu.attribution for gpu in seen_gpus]


PROCESS, UUID, SINGLE, ASSUMED = Attribution.PROCESS, Attribution.UUID, Attribution.SINGLE, Attribution.ASSUMED


def test_all_takes_every_device() -> None:
    seen_gpus = last((gpus(device(0), device(1)), NO_PROC), selection=Selection(everything=True))

    assert attributions(seen_gpus) == [ASSUMED, ASSUMED]


@pytest.mark.parametrize(
    "listed", [("GPU-1", "GPU-2"), ("1", "2"), ("GPU-1", "2"), ("2", "1", "7", "GPU-x"), ("gpu-1", "Gpu-2")]
)
def test_a_list_takes_the_devices_it_names(listed: tuple[str, ...]) -> None:
    readings = gpus(device(0, (7, 1)), device(1), device(2), device(12))
    seen_gpus = last((readings, engine(7)), selection=Selection(listed=listed))

    assert attributions(seen_gpus) == [None, UUID, UUID, None]


def test_an_index_is_the_one_that_a_device_had_first() -> None:
    """NVML counts again when it is opened again and one is gone; which GPUs the engine has does not change with it."""
    first_readings = gpus(device(0), device(1), device(2))
    a, b, c = first_readings.devices
    lost = GpuReading(index=0, uuid=a.uuid, name="H100", failure=NO_PROC)
    now = gpus(replace(b, index=0), replace(c, index=1), lost)

    assert attributions(last((first_readings, NO_PROC), (now, NO_PROC), selection=Selection(listed=("1",)))) == [
        UUID,
        None,
        None,
    ]
    assert attributions(last((first_readings, NO_PROC), (now, NO_PROC), selection=Selection(listed=("0",)))) == [
        None,
        None,
        UUID,
    ]


def test_a_part_of_a_uuid_is_not_its_name() -> None:
    assert attributions(last((gpus(device(1)), NO_PROC), selection=Selection(listed=("GPU-",)))) == [None]


def test_auto_takes_the_devices_that_hold_memory_of_the_engine() -> None:
    readings = gpus(device(0, (7, 1)), device(1, (99, 1)), device(2, (99, 1), (8, 1)), device(3))

    assert attributions(last((readings, engine(7, 8)))) == [PROCESS, None, PROCESS, None]


def test_auto_takes_the_only_device() -> None:
    assert attributions(last((gpus(device(0)), NO_PROC))) == [SINGLE]


@pytest.mark.parametrize("processes", [NO_PROC, engine(), engine(7)], ids=["no /proc", "no engine", "not on a device"])
def test_auto_never_takes_one_of_several_by_guess(processes: ProcessReadings | Failure) -> None:
    assert attributions(last((gpus(device(0, (99, 1)), device(1)), processes))) == [None, None]


def test_no_device_is_no_problem() -> None:
    assert last((gpus(), engine(7))) == ()


UP = (gpus(device(0, (7, GIB)), device(1, (8, GIB)), device(2)), engine(7, 8))


@pytest.mark.parametrize(
    "down",
    [
        (gpus(device(0), device(1), device(2)), engine()),
        (gpus(device(0), device(1), device(2)), NO_PROC),
        (gpus(device(0, listed=False), device(1, listed=False), device(2, listed=False)), engine(7, 8)),
        (gpus(device(0), device(1), device(2)), engine(17, 18, started=100.0)),
        (gpus(device(0), device(1, (8, GIB)), device(2)), engine(8)),
        (gpus(device(0, (7, GIB)), device(1, (8, GIB)), device(2)), engine(visible=(7, 8), ambiguous=2)),
    ],
    ids=["down", "no /proc", "no process list", "restarting", "giving back one after another", "beside another engine"],
)
def test_auto_remembers_the_devices(down: tuple[GpuReadings, ProcessReadings | Failure]) -> None:
    assert attributions(last(UP, down)) == [PROCESS, PROCESS, None]


def test_auto_forgets_them_when_a_new_engine_holds_memory_elsewhere() -> None:
    new = (gpus(device(0), device(1, (18, GIB)), device(2, (17, GIB))), engine(17, 18, started=100.0))

    assert attributions(last(UP, new)) == [None, PROCESS, PROCESS]


def test_the_same_pid_with_another_start_is_a_new_engine() -> None:
    new = (gpus(device(0), device(1), device(2, (7, GIB))), engine(7, started=100.0))

    assert attributions(last(UP, new)) == [None, None, PROCESS]


def test_an_engine_that_spreads_keeps_its_devices() -> None:
    grown = (gpus(device(0), device(1, (8, GIB)), device(2, (7, GIB), (8, 1))), engine(7, 8))

    assert attributions(last(UP, grown)) == [PROCESS, PROCESS, PROCESS]


def test_the_device_left_when_the_engines_is_lost_is_not_taken() -> None:
    assert attributions(last((gpus(device(0, (7, 1)), device(1)), engine(7)), (gpus(device(1)), engine()))) == [None]


@pytest.mark.parametrize(
    ("driver", "host", "is_known", "ledger_known"),
    [
        (OLD_DRIVER, False, False, False),
        (OLD_DRIVER, True, True, True),
        ("535.113.01", False, True, False),
        (MIDDLE_DRIVER, False, True, False),
        (MIDDLE_DRIVER, True, True, True),
        ("565.57", False, True, False),
        (NEW_DRIVER, False, True, True),
        ("570.86.15", False, True, True),
        ("600.1", False, True, True),
        ("5650.1.1", False, True, True),
        (None, False, False, False),
        (None, True, True, True),
        ("", False, False, False),
        ("rel-17", False, False, False),
    ],
)
def test_pids_are_believed_where_the_driver_means_the_same_processes(
    driver: str | None, *, host: bool, is_known: bool, ledger_known: bool
) -> None:
    readings = gpus(device(0, (7, GIB), (99, MIB)), device(1), driver=driver)
    seen_gpus = last((readings, engine(7, visible=(99,), host=host)))

    assert attributions(seen_gpus) == [PROCESS if is_known else None, None]
    assert ledger(seen_gpus) == ([(GIB, MIB), (0, 0)] if ledger_known else [(None, None)] * 2)
