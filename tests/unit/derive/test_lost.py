"""GPUs that were lost before the daemon began, of an engine that runs."""

from __future__ import annotations

from typing import Final

import pytest
from msgspec.structs import replace

from tests.samples import failure, gpu, snapshot
from vllm_headroom.derive.attribution import add_lost_gpus
from vllm_headroom.model import EngineStatus, Failure, Gpu, Snapshot
from vllm_headroom.vocabulary import Attribution, EngineState, Reason, Source

LOST: Final = Failure(source=Source.NVML, reason=Reason.DEVICE_LOST, message="the GPU is lost")
IDLE: Final = gpu(index=0, uuid="GPU-a", attribution=None)


def unopened(index: int) -> Gpu:
    return gpu(index=index, uuid="", memory=False, attribution=None, failure=LOST)


def make_snapshot(*gpus: Gpu, had: tuple[str, ...]) -> Snapshot:
    status = EngineStatus(state=EngineState.SERVING, first_room_bytes=tuple((uuid, 5) for uuid in had))
    return replace(snapshot(gpus=gpus), engine_status=status)


def owned(at: Snapshot) -> list[tuple[int, str]]:
    return [(gpu.reading.index, gpu.reading.uuid) for gpu in add_lost_gpus(at).owned_gpus]


def test_the_one_that_does_not_open_is_the_one_that_is_missing() -> None:
    assert owned(make_snapshot(IDLE, unopened(1), had=("GPU-b",))) == [(1, "GPU-b")]


def test_of_several_that_are_missing_none_is_reported_by_name() -> None:
    assert owned(make_snapshot(unopened(0), unopened(1), had=("GPU-a", "GPU-b"))) == [(0, ""), (1, "")]


def test_where_more_do_not_open_than_are_missing_nobody_knows_which_is_the_engines() -> None:
    assert owned(make_snapshot(unopened(0), unopened(1), had=("GPU-b",))) == []


def test_another_that_is_the_only_one_left_is_not_the_engines() -> None:
    remaining_gpu = gpu(index=0, uuid="GPU-a", attribution=Attribution.SINGLE)

    assert owned(make_snapshot(remaining_gpu, had=("GPU-b",))) == []
    assert owned(make_snapshot(remaining_gpu, had=("GPU-a", "GPU-b"))) == [(0, "GPU-a")]


@pytest.mark.parametrize(
    "at",
    [
        make_snapshot(IDLE, unopened(1), had=()),
        make_snapshot(gpu(index=0, uuid="GPU-a"), unopened(1), had=("GPU-a",)),
        replace(make_snapshot(IDLE, unopened(1), had=("GPU-b",)), engine_status=None),
        replace(make_snapshot(had=("GPU-b",)), gpus=failure(Source.NVML)),
    ],
    ids=["no life with a GPU", "all show", "life not known", "no GPU can be read"],
)
def test_what_tells_of_no_loss_stays_as_it_is(at: Snapshot) -> None:
    assert add_lost_gpus(at) == at
