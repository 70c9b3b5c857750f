"""The GPU's part, over modules with the structure of torch's and vLLM's: what is read, from where, and when not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final
from uuid import UUID

import pytest

from tests.fakes.inside import torch
from tests.fakes.inside.torch import cuda
from tests.fakes.inside.vllm.device_allocator import cumem
from tests.fakes.inside.vllm.device_allocator.cumem import AllocationData, CuMemAllocator
from tests.fakes.inside.vllm.engine import config
from tests.fakes.inside.vllm.worker import WorkerBase
from vllm_headroom_probe.gpu import WorkerGpu, can_read_torch, read_pinned

GIB: Final = 1 << 30


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The fakes in the places where the real ones are; CUDA is initialised."""
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", cumem)
    monkeypatch.setattr(CuMemAllocator, "instance", None)
    monkeypatch.setattr(cuda, "_initialized", True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("NVIDIA_VISIBLE_DEVICES", raising=False)
    yield
    cuda.asked.clear()


@pytest.fixture
def worker() -> Any:
    new_worker: Any = WorkerBase(config(0), 3)
    new_worker.device = SimpleNamespace(type="cuda", index=3)
    new_worker.current_platform = type("CudaPlatform", (), {"_global_graph_pool": (0, 1)})()
    new_worker.peak_activation_memory, new_worker.requested_memory = 2 * GIB, 72.5 * GIB
    new_worker.cudagraph_memory_estimate = 4 * GIB
    new_worker.model_runner.model_memory_usage = 14 * GIB
    return new_worker


def test_the_workers_own_device_is_asked_by_its_index(worker: Any) -> None:
    gpu = WorkerGpu()

    assert gpu.read_device(worker) == {
        "uuid": f"GPU-{cuda.UUID}",
        "total": 80 * GIB,
        "allocated": 60 * GIB,
        "reserved": 64 * GIB,
        "inactive_split": GIB,
        "retries": 2,
        "ooms": 1,
    }
    assert cuda.asked == [3]
    assert gpu.call_seconds > 0
    assert gpu.read_parts(worker) == {
        "weights": 14 * GIB,
        "kv_cache": GIB,
        "cuda_graphs": 3 * GIB,
        "cuda_graphs_estimate": 4 * GIB,
        "activation_peak": 2 * GIB,
        "requested": int(72.5 * GIB),
    }


def test_before_cuda_is_initialised_and_without_a_worker_nothing_is_asked(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert WorkerGpu().read_device(None) is None
    assert WorkerGpu().read_parts(None) is None
    monkeypatch.setattr(cuda, "_initialized", False)
    assert WorkerGpu().read_device(worker) is None

    monkeypatch.delitem(sys.modules, "torch")
    assert WorkerGpu().read_device(worker) is None
    assert cuda.asked == []


def asks_for_sleep(worker: Any) -> None:
    worker.vllm_config.model_config.enable_sleep_mode = True


def asks_for_cumem(worker: Any) -> None:
    worker.vllm_config.model_config.enable_cumem_allocator = True


def has_a_pool(_: Any) -> None:
    CuMemAllocator.instance = CuMemAllocator()


def has_no_settings(worker: Any) -> None:
    del worker.vllm_config.model_config


@pytest.mark.parametrize("why", [asks_for_sleep, asks_for_cumem, has_a_pool, has_no_settings])
def test_torch_is_never_asked_where_its_allocator_may_wait_for_python(worker: Any, why: Callable[[Any], None]) -> None:
    assert can_read_torch(worker)
    why(worker)
    gpu = WorkerGpu()

    assert not can_read_torch(worker)
    assert gpu.read_device(worker) == {"uuid": f"GPU-{cuda.UUID}", "total": 80 * GIB}
    parts = gpu.read_parts(worker)
    assert parts is not None
    assert (parts["kv_cache"], parts["cuda_graphs"]) == (None, None), "no tensor of the pool is touched"
    assert cuda.asked == []


def test_a_pool_that_sleeps_is_reported_by_tag_from_vllms_own_books(worker: Any) -> None:
    pool = CuMemAllocator()
    CuMemAllocator.instance = pool
    for pointer, (size, tag) in enumerate([(10, "weights"), (4, "weights"), (30, "kv_cache"), (5, "runtime")]):
        pool.pointer_to_data[pointer] = AllocationData((0, size * GIB, pointer, 0), tag)

    awake = WorkerGpu().read_parts(worker)
    assert awake is not None
    assert awake["asleep"] is False
    assert awake["pool"] == {"weights": 14 * GIB, "kv_cache": 30 * GIB, "runtime": 5 * GIB}

    pool.pointer_to_data[0].is_asleep = pool.pointer_to_data[2].is_asleep = True
    asleep = WorkerGpu().read_parts(worker)
    assert asleep is not None
    assert asleep["asleep"] is True
    assert asleep["pool"] == {"weights": 4 * GIB, "kv_cache": 0, "runtime": 5 * GIB}


def test_a_pool_that_does_not_mark_its_sleep_says_nothing(worker: Any) -> None:
    CuMemAllocator.instance = CuMemAllocator()
    CuMemAllocator.instance.pointer_to_data[0] = SimpleNamespace(handle=(0, GIB, 0, 0), tag="weights")  # type: ignore[assignment]

    parts = WorkerGpu().read_parts(worker)

    assert parts is not None
    assert not {"asleep", "pool"} & set(parts)


@pytest.mark.parametrize(
    ("visible", "uuid"), [("MIG-1,MIG-2", f"MIG-{cuda.UUID}"), ("all", f"GPU-{cuda.UUID}"), ("3", f"GPU-{cuda.UUID}")]
)
def test_the_uuid_is_written_as_nvml_has_it(
    worker: Any, monkeypatch: pytest.MonkeyPatch, visible: str, uuid: str
) -> None:
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", visible)

    device_facts = WorkerGpu().read_device(worker)
    assert device_facts is not None
    assert device_facts["uuid"] == uuid


def test_the_uuid_of_an_amd_card_is_its_id(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """HIP writes the id's digits as the bytes of a UUID, which torch prints as hexadecimal."""
    monkeypatch.setattr(cuda, "UUID", UUID(bytes=b"fc1d2a3b4c5d6e7f"))

    device_facts = WorkerGpu().read_device(worker)
    assert device_facts is not None
    assert device_facts["uuid"] == "GPU-fc1d2a3b4c5d6e7f"


def test_figures_that_a_torch_does_not_have_are_absent(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "STATS", {"allocated_bytes": cuda.STATS["allocated_bytes"]})
    gpu = WorkerGpu()

    device_facts = gpu.read_device(worker)
    assert device_facts is not None
    assert device_facts["allocated"] == 60 * GIB
    assert {name: device_facts[name] for name in ("reserved", "inactive_split", "retries", "ooms")} == {
        "reserved": None,
        "inactive_split": None,
        "retries": None,
        "ooms": None,
    }
    parts = gpu.read_parts(worker)
    assert parts is not None
    assert parts["cuda_graphs"] is None


@pytest.mark.parametrize(
    ("stats", "pinned_bytes"),
    [
        ({"allocated_bytes": {"current": 5}, "active_bytes": {"current": 3}}, 5),
        ({"allocated_bytes": {"current": 3}, "reserved_bytes": {"current": 5}}, 5),
        ({}, None),
    ],
)
def test_what_torch_has_pinned_counts_with_its_cache(
    stats: dict[str, Any], pinned_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "host_stats", stats)
    assert read_pinned() == pinned_bytes

    monkeypatch.setattr(cuda, "_initialized", False)
    assert read_pinned() is None
