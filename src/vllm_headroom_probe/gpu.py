"""Read the worker's GPU memory from torch's allocator and vLLM's bookkeeping."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

from vllm_headroom_probe.engine import read_own, to_whole

CALLBACKS = ("enable_sleep_mode", "enable_cumem_allocator")
"""With these, vLLM's allocator calls Python while torch's is locked: reading torch's figures from another thread, which
waits for that lock with the GIL held, would stop the engine for good (vllm/csrc/cumem_allocator.cpp)."""


def find_pool() -> Any:  # noqa: ANN401 - vLLM's
    """Return vLLM's allocator for sleep mode, None without one."""
    return read_own(
        read_own(sys.modules.get("vllm.device_allocator.cumem"), "CuMemAllocator"), "instance"
    )


def can_ask_torch(worker: object) -> bool:
    """Return whether torch's allocator can be read: only where it certainly never waits for Python."""
    model = read_own(worker, "vllm_config.model_config")
    return (
        model is not None
        and not any(read_own(model, name) for name in CALLBACKS)
        and find_pool() is None
    )


def find_cuda() -> Any:  # noqa: ANN401 - torch's
    """Return torch.cuda where vLLM has initialised it in this process, else None."""
    module = read_own(sys.modules.get("torch"), "cuda")
    return module if module is not None and module.is_initialized() else None


class WorkerGpu:
    """The device of this process's worker; `call_seconds` is the time of the last call of its allocator."""

    def __init__(self) -> None:
        self.call_seconds = 0.0
        self._graphs: int | None = None
        self._model: tuple[int, int] | None = None
        self._fixed: dict[str, Any] = {}

    def device(self, worker: object) -> dict[str, Any] | None:
        """Return torch's facts about the device; None without a GPU, or while its worker is unknown."""
        index = to_whole(getattr(read_own(worker, "device"), "index", None))
        torch_cuda = find_cuda()
        if torch_cuda is None or index is None:
            return None
        if not self._fixed:
            properties = torch_cuda.get_device_properties(index)
            self._fixed = {
                "uuid": _format_uuid(properties),
                "total": to_whole(properties.total_memory),
            }
        if self._fixed["uuid"] is None:  # the figures could not be attributed
            return None
        return self._fixed | (
            self._allocator(torch_cuda, index, worker) if can_ask_torch(worker) else {}
        )

    def _allocator(self, torch_cuda: Any, index: int, worker: object) -> dict[str, int | None]:  # noqa: ANN401
        """Return torch's figures, by index: this thread's current device is another."""
        began = time.perf_counter()
        stats = torch_cuda.memory_stats_as_nested_dict(index)
        self.call_seconds = time.perf_counter() - began
        # torch reports vLLM's pool of CUDA graphs since 2.13
        handle = getattr(type(read_own(worker, "current_platform")), "_global_graph_pool", None)
        graphs = stats.get("reserved_bytes_by_private_pools", {}).get(handle)
        self._graphs = None if graphs is None else to_whole(graphs["all"]["current"])
        names = ("allocated", "reserved", "inactive_split")
        return {
            **{
                name: to_whole(stats.get(f"{name}_bytes", {}).get("all", {}).get("current"))
                for name in names
            },
            "retries": to_whole(stats.get("num_alloc_retries")),
            "ooms": to_whole(stats.get("num_ooms")),
        }

    def parts(self, worker: object) -> dict[str, Any] | None:
        """Return the parts of the worker's memory; None where there is no worker yet."""
        if worker is None:
            return None
        in_pool = _sum_by_tag() if find_pool() is not None else {}
        caches = read_own(worker, "model_runner.kv_caches")
        has_caches = caches and can_ask_torch(worker)  # the sleep pool is not touched
        return {
            "weights": self._weights(worker),
            "kv_cache": _sum_bytes(list(_walk_tensors(caches))) if has_caches else None,
            "cuda_graphs": self._graphs,
            "cuda_graphs_estimate": to_whole(read_own(worker, "cudagraph_memory_estimate")),
            "activation_peak": to_whole(read_own(worker, "peak_activation_memory")),
            "requested": to_whole(read_own(worker, "requested_memory")),
            **in_pool,
        }

    def _weights(self, worker: object) -> int | None:
        """Return the model's memory as vLLM measured it, else (as on a CPU) its parameters and buffers."""
        measured = to_whole(read_own(worker, "model_runner.model_memory_usage"))
        model = read_own(worker, "model_runner.model")
        if measured or model is None or not can_ask_torch(worker):
            return measured or None
        if self._model is None or self._model[0] != id(model):
            self._model = id(model), _sum_bytes([*model.parameters(), *model.buffers()])
        return self._model[1]


def _format_uuid(properties: Any) -> str | None:  # noqa: ANN401 - torch's
    """Return the UUID as the driver's tools write it; HIP fills it with an AMD card's id (hip_device.cpp)."""
    uuid = getattr(properties, "uuid", None)  # torch 2.5
    digits = bytes.fromhex(str(uuid or "").replace("-", ""))
    if re.fullmatch(rb"[0-9a-f]{16}", digits):
        return f"GPU-{digits.decode()}"
    visible = (
        os.environ.get("CUDA_VISIBLE_DEVICES") or os.environ.get("NVIDIA_VISIBLE_DEVICES") or ""
    )
    return None if uuid is None else f"{'MIG' if visible.startswith('MIG-') else 'GPU'}-{uuid}"


def _sum_by_tag() -> dict[str, Any]:
    """Return the sleep pool's bytes by tag, and whether any of it sleeps; nothing where vLLM does not mark sleep."""
    held: dict[str, int] = {}
    asleep = False
    for allocation in list(read_own(find_pool(), "pointer_to_data").values()):
        if "is_asleep" not in vars(allocation):
            return {}
        asleep = asleep or bool(allocation.is_asleep)
        size = 0 if allocation.is_asleep else int(allocation.handle[1])
        held[str(allocation.tag)[:32]] = held.get(str(allocation.tag)[:32], 0) + size
    return {"asleep": asleep, "pool": held}


def _walk_tensors(caches: Any) -> Iterator[Any]:  # noqa: ANN401 - vLLM's, nested by kind of layer
    for cache in caches:
        if isinstance(cache, (list, tuple)):
            yield from _walk_tensors(cache)
        else:
            yield cache


def _sum_bytes(tensors: list[Any]) -> int:
    """Return the bytes of the storages of tensors, each storage once."""
    storages = {
        storage.data_ptr(): storage.nbytes()
        for storage in (tensor.untyped_storage() for tensor in tensors)
    }
    return sum(storages.values())
