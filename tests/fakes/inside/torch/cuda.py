"""As torch/cuda/__init__.py: nothing is known before CUDA is initialised, and calls are queued until then.

The figures have the structure that torch 2.13 documents at torch.cuda.memory_stats, before it is flattened.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

UUID = "f6a2c9d4-0d8e-4a0b-9c53-2f8c1f7a6b10"
asked: list[int] = []
_initialized = False
_tls = SimpleNamespace(is_initializing=False)
_queued: list[Any] = []
host_stats: dict[str, Any] = {"allocated_bytes": {"current": 5 << 20, "peak": 9 << 20}, "active_bytes": {"current": 3}}
histories: list[Any] = []
"""The arguments of each call that begins or ends torch's memory history."""
memory = SimpleNamespace(
    _record_memory_history=lambda *arguments, **named: histories.append((*arguments, named)), _snapshot=dict
)


def _pools(current: int) -> dict[str, dict[str, int]]:
    pool_figures = {"current": current, "peak": current + 1, "allocated": 7 * current, "freed": 6 * current}
    return {
        "all": pool_figures,
        "small_pool": dict.fromkeys(pool_figures, 1),
        "large_pool": dict.fromkeys(pool_figures, 2),
    }


STATS: dict[str, Any] = {
    "allocated_bytes": _pools(60 << 30),
    "reserved_bytes": _pools(64 << 30),
    "inactive_split_bytes": _pools(1 << 30),
    "active_bytes": _pools(61 << 30),
    "num_alloc_retries": 2,
    "num_ooms": 1,
    "reserved_bytes_by_private_pools": {(0, 1): _pools(3 << 30), (0, 2): _pools(5)},
}


def is_initialized() -> bool:
    return _initialized


def _lazy_call(call: Any) -> None:
    if _initialized:
        call()
    else:
        _queued.append(call)


def begin() -> None:
    """Initialise, as the worker does."""
    global _initialized  # noqa: PLW0603 - as torch has it
    _tls.is_initializing = True
    for call in _queued:
        call()
    _tls.is_initializing = False
    _initialized = True


def memory_stats_as_nested_dict(device: int) -> dict[str, Any]:
    assert _initialized
    asked.append(device)
    return STATS


def host_memory_stats_as_nested_dict() -> dict[str, Any]:
    return host_stats if _initialized else {}


def get_device_properties(device: int) -> Any:
    assert _initialized
    return SimpleNamespace(uuid=UUID, total_memory=80 << 30, index=device)
