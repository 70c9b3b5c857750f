"""Whose memory is it, and how much is left, where several share a GPU."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.samples import gpu, probed, snapshot
from tests.unit.derive.attribution_ticks import GIB, MIB, OLD_DRIVER, device, engine, gpus, last, ledger
from vllm_headroom.derive.inside import add_inside
from vllm_headroom.derive.leak.leak import observe_gpus
from vllm_headroom.model import AllocatorReading, Gpu, Inside, ProbeReadings, Vendor
from vllm_headroom.vocabulary import Attribution

SERVER, NEIGHBOUR = 100, 99
CARD, SLICE = 80 * GIB, 20 * GIB


def test_an_engine_that_computes_through_mps_is_found_and_its_neighbours_are_others() -> None:
    readings = gpus(
        device(0, (SERVER, 30 * MIB), (7, 20 * GIB), (NEIGHBOUR, 10 * GIB), used=31 * GIB), device(1, used=GIB)
    )

    seen_gpus = last((readings, engine(7, visible=(SERVER, NEIGHBOUR))))

    assert [seen_gpu.attribution for seen_gpu in seen_gpus] == [Attribution.PROCESS, None]
    assert ledger(seen_gpus)[0] == (20 * GIB, 10 * GIB + 30 * MIB)


def test_on_a_vgpu_all_that_is_used_is_taken_for_the_engines() -> None:
    (seen_gpu,) = last((gpus(device(0, used=35 * GIB, listed=False)), engine(7)))

    assert (seen_gpu.attribution, seen_gpu.engine_bytes, seen_gpu.held_bytes) == (Attribution.SINGLE, None, 35 * GIB)


def test_amds_processes_are_believed_whatever_nvidias_driver_is() -> None:
    card = replace(device(0, (7, 3 * GIB)), vendor=Vendor.AMD)

    for driver in (None, OLD_DRIVER, "6.8.5"):
        (seen_gpu,) = last((gpus(card, driver=driver), engine(7)))

        assert (seen_gpu.attribution, seen_gpu.engine_bytes) == (Attribution.PROCESS, 3 * GIB)


def test_beside_an_old_driver_of_nvidias_no_pid_is_believed() -> None:
    """One namespace, one driver that lists the host's pids: a pid on its GPU could be anybody's."""
    readings = gpus(replace(device(0, (7, 3 * GIB)), vendor=Vendor.AMD), device(1, (7, GIB)), driver=OLD_DRIVER)

    assert [seen_gpu.attribution for seen_gpu in last((readings, engine(7)))] == [None, None]


def sliced(engine_bytes: int | None, granted: int | None) -> Gpu:
    """Return a GPU of 80 GiB with 50 in use, of which a layer grants the engine a share."""
    inside = None if granted is None else Inside(granted_bytes=granted)
    return gpu(total=CARD, used=50 * GIB, engine=engine_bytes, inside=inside)


@pytest.mark.parametrize(
    ("sliced_gpu", "room_bytes"),
    [
        (sliced(15 * GIB, SLICE), 5 * GIB),
        (sliced(21 * GIB, SLICE), 0),
        (sliced(15 * GIB, CARD), 30 * GIB),
        (sliced(15 * GIB, None), 30 * GIB),
        (sliced(None, SLICE), 30 * GIB),
    ],
)
def test_an_engine_runs_out_of_its_share_before_the_card_is_full(sliced_gpu: Gpu, room_bytes: int) -> None:
    [(_, observed)] = observe_gpus(snapshot(), (sliced_gpu,))

    assert observed.room_bytes == room_bytes


def test_what_is_granted_is_the_least_that_a_process_was_reported() -> None:
    devices = [AllocatorReading(uuid="GPU-a", total_bytes=total) for total in (SLICE, None, CARD)]
    present = tuple(probed(devices=(allocator_device,)) for allocator_device in devices)

    gpus_with_inside = add_inside((gpu(total=CARD, used=GIB),), ProbeReadings(present=present))

    assert isinstance(gpus_with_inside, tuple)
    assert gpus_with_inside[0].inside == Inside(granted_bytes=SLICE)
