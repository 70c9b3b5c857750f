"""Read the worker's GPU memory from torch's allocator and vLLM's bookkeeping."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from vllm_headroom_probe.engine import read_own, to_integer

CALLBACK_OPTIONS = ("enable_sleep_mode", "enable_cumem_allocator")
"""Options that make vLLM's allocator call Python while torch's allocator is locked. A thread that
then reads torch's figures waits for the lock. The thread holds the GIL meanwhile. The engine would
then deadlock (vllm/csrc/cumem_allocator.cpp).
"""

ALLOCATOR_FIGURES = ("allocated", "reserved", "inactive_split")
"""The figures that are read, by their names in torch's statistics."""

MAX_TAG_CHARACTERS = 32
"""The number of characters that are kept from a tag in the sleep pool."""


def find_sleep_pool() -> Any:  # noqa: ANN401 - vLLM's
    """Return vLLM's allocator for sleep mode, or None if there is none."""
    module = sys.modules.get("vllm.device_allocator.cumem")
    return read_own(read_own(module, "CuMemAllocator"), "instance")


def can_read_torch(worker: object) -> bool:
    """Return whether reading torch's allocator is safe because it never calls Python.

    Returns False if the worker's configuration is unknown.
    """
    model = read_own(worker, "vllm_config.model_config")
    if model is None or find_sleep_pool() is not None:
        return False
    return not any(read_own(model, name) for name in CALLBACK_OPTIONS)


def find_cuda() -> Any:  # noqa: ANN401 - torch's
    """Return torch.cuda, or None if vLLM has not initialised CUDA in this process."""
    module = read_own(sys.modules.get("torch"), "cuda")
    return module if module is not None and module.is_initialized() else None


def read_pinned() -> int | None:
    """Return the host memory pinned by torch, whether in use or cached.

    torch's allocator for pinned memory has its own locks and never waits for Python. Returns None
    before torch 2.7.
    """
    torch_cuda = find_cuda()
    if torch_cuda is None:
        return None
    stats = torch_cuda.host_memory_stats_as_nested_dict()
    # In torch 2.7 to 2.9, `allocated_bytes` is the pinned memory in use. In these versions,
    # `reserved_bytes` is all pinned memory.
    owned = stats.get("reserved_bytes") or stats.get("allocated_bytes") or {}
    return to_integer(owned.get("current"))


class MeasuredModel(NamedTuple):
    """A model's identity in this process and the size of its tensors."""

    identity: int
    size_bytes: int


class WorkerGpu:
    """The device of this process's worker."""

    def __init__(self) -> None:
        self.call_seconds = 0.0
        """How long the last call to torch's allocator took, in seconds."""
        self._graphs_bytes: int | None = None
        """The memory of captured graphs at the last reading. The value is None if torch does not
        report it.
        """
        self._model: MeasuredModel | None = None
        """The model whose tensors were last measured."""
        self._constant_facts: dict[str, Any] = {}
        """The device's UUID and total memory; empty before the first reading."""

    def read_device(self, worker: object) -> dict[str, Any] | None:
        """Return torch's facts about the device.

        If torch's allocator is not safe to read, only the UUID and the total memory are returned.
        Returns None if there is no GPU. Also returns None if the worker or UUID is unknown.
        """
        index = to_integer(getattr(read_own(worker, "device"), "index", None))
        torch_cuda = find_cuda()
        if torch_cuda is None or index is None:
            return None
        if not self._constant_facts:
            properties = torch_cuda.get_device_properties(index)
            self._constant_facts = {
                "uuid": _format_uuid(properties),
                "total": to_integer(properties.total_memory),
            }
        # Without the UUID, the sidecar could not tell which GPU the figures belong to.
        if self._constant_facts["uuid"] is None:
            return None
        if not can_read_torch(worker):
            return dict(self._constant_facts)
        return self._constant_facts | self._read_allocator(torch_cuda, index, worker)

    def _read_allocator(self, torch_cuda: Any, index: int, worker: object) -> dict[str, int | None]:  # noqa: ANN401
        """Return torch's figures for a device, with None for those that torch lacks."""
        # The device is selected by its index. The current device of this thread may be a different
        # GPU.
        start_seconds = time.perf_counter()
        stats = torch_cuda.memory_stats_as_nested_dict(index)
        self.call_seconds = time.perf_counter() - start_seconds
        # Since torch 2.13, these statistics include vLLM's CUDA graph pool.
        pool = getattr(type(read_own(worker, "current_platform")), "_global_graph_pool", None)
        graphs = stats.get("reserved_bytes_by_private_pools", {}).get(pool)
        self._graphs_bytes = None if graphs is None else to_integer(graphs["all"]["current"])
        figures: dict[str, int | None] = {}
        for name in ALLOCATOR_FIGURES:
            figure = stats.get(f"{name}_bytes", {}).get("all", {}).get("current")
            figures[name] = to_integer(figure)
        figures["retries"] = to_integer(stats.get("num_alloc_retries"))
        figures["ooms"] = to_integer(stats.get("num_ooms"))
        return figures

    def read_parts(self, worker: object) -> dict[str, Any] | None:
        """Return the parts of the worker's memory, or None if there is no worker yet."""
        if worker is None:
            return None
        caches = read_own(worker, "model_runner.kv_caches")
        cache_bytes = None
        # Tensors in a sleep pool must not be touched.
        if caches and can_read_torch(worker):
            cache_bytes = _sum_bytes(list(_list_tensors(caches)))
        return {
            "weights": self._measure_weights(worker),
            "kv_cache": cache_bytes,
            "cuda_graphs": self._graphs_bytes,
            "cuda_graphs_estimate": to_integer(read_own(worker, "cudagraph_memory_estimate")),
            "activation_peak": to_integer(read_own(worker, "peak_activation_memory")),
            "requested": to_integer(read_own(worker, "requested_memory")),
            **_read_sleep_pool(),
        }

    def _measure_weights(self, worker: object) -> int | None:
        """Return the model's memory as measured by vLLM, or else its tensors' size.

        On a CPU, for example, vLLM does not measure the model's memory. Returns None if there is no
        model or its tensors must not be read.
        """
        measured_bytes = to_integer(read_own(worker, "model_runner.model_memory_usage"))
        if measured_bytes:
            return measured_bytes
        model = read_own(worker, "model_runner.model")
        if model is None or not can_read_torch(worker):
            return None
        # Each model is measured only once.
        if self._model is None or self._model.identity != id(model):
            size_bytes = _sum_bytes([*model.parameters(), *model.buffers()])
            self._model = MeasuredModel(id(model), size_bytes)
        return self._model.size_bytes


def _format_uuid(properties: Any) -> str | None:  # noqa: ANN401 - torch's
    """Return a device's UUID as the driver's tools write it.

    Returns None before torch 2.5. If the process uses a MIG instance, this is the instance's UUID.
    """
    uuid = getattr(properties, "uuid", None)
    digits = bytes.fromhex(str(uuid or "").replace("-", ""))
    # HIP stores the text of an AMD card's ID in these bytes (hip_device.cpp).
    if re.fullmatch(rb"[0-9a-f]{16}", digits):
        return f"GPU-{digits.decode()}"
    if uuid is None:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or os.environ.get("NVIDIA_VISIBLE_DEVICES")
    is_instance = (visible or "").startswith("MIG-")
    return f"MIG-{uuid}" if is_instance else f"GPU-{uuid}"


def _read_sleep_pool() -> dict[str, Any]:
    """Return the sleep pool's bytes by tag, and whether part of the pool is asleep.

    Sleeping memory counts as 0 bytes. The result is empty if there is no pool, or if vLLM does not
    mark sleeping memory.
    """
    pool = find_sleep_pool()
    if pool is None:
        return {}
    sizes_bytes: dict[str, int] = {}
    is_asleep = False
    for allocation in list(read_own(pool, "pointer_to_data").values()):
        if "is_asleep" not in vars(allocation):
            return {}
        tag = str(allocation.tag)[:MAX_TAG_CHARACTERS]
        sizes_bytes.setdefault(tag, 0)
        if allocation.is_asleep:
            is_asleep = True
        else:
            sizes_bytes[tag] += int(allocation.handle[1])
    return {"asleep": is_asleep, "pool": sizes_bytes}


def _list_tensors(caches: Any) -> Iterator[Any]:  # noqa: ANN401 - vLLM's, nested by kind of layer
    """Yield the tensors in caches, which may be nested lists."""
    for cache in caches:
        if isinstance(cache, (list, tuple)):
            yield from _list_tensors(cache)
        else:
            yield cache


def _sum_bytes(tensors: list[Any]) -> int:
    """Return the total size of the tensors' storages, counting each storage once."""
    sizes_bytes: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        sizes_bytes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes_bytes.values())
