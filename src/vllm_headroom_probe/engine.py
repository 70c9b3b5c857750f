"""Read the attributes of the worker and the core of vLLM 0.9 to 0.33."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

HOLDERS = {
    "init_worker": "self",
    "__init__": "self",
    "worker_main": "worker",
    "run_engine_core": "engine_core",
}
"""Functions of vLLM in which a process builds or keeps its worker or core, and the name of the variable."""

LOOPS = {"worker_main", "run_engine_core"}
"""Those that run as long as the process: reading their few variables keeps no tensor alive."""

WORKERS = {"WorkerWrapperBase", "WorkerProc", "WorkerBase"}
CORE = "EngineCore"
FULL = "FullAttentionSpec"
"""Layers in which every token keeps its place in the cache; windows release it."""
MOST_BLOCKS = 100_000
"""Blocks of live requests that are counted, in about 10 ms."""


def read_own(thing: object, path: str) -> Any:  # noqa: ANN401 - any object of vLLM
    """Return an object's instance attribute by path; None without one."""
    for name in path.split("."):
        thing = getattr(thing, "__dict__", {}).get(name)
    return thing


def to_whole(value: Any) -> int | None:  # noqa: ANN401 - vLLM's or torch's
    """Return a number as an integer; None for anything that is no amount."""
    is_amount = (
        isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1 << 63
    )
    return int(value) if is_amount else None


class EngineObjects:
    """The worker and the core of this process, weakly referenced: vLLM may release them."""

    def __init__(self) -> None:
        self._worker: Callable[[], Any] = lambda: None
        self._core: Callable[[], Any] = lambda: None

    def search(self, frame: FrameType | None) -> None:
        """Search a stack for them, from this frame down."""
        while frame is not None:
            if (name := HOLDERS.get(frame.f_code.co_name)) is not None:
                self._keep(frame.f_locals.get(name))
            frame = frame.f_back

    def search_main(self) -> None:
        """Search the main thread's stack: vLLM does not call the plugin in a forked process."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001
        while frame is not None and frame.f_code.co_name not in LOOPS:
            frame = frame.f_back
        if frame is not None:
            self._keep(frame.f_locals.get(HOLDERS[frame.f_code.co_name]))

    def _keep(self, thing: object) -> None:
        kinds = {kind.__name__ for kind in type(thing).__mro__}
        if kinds & WORKERS:
            self._worker = weakref.ref(thing)
        elif CORE in kinds:
            self._core = weakref.ref(thing)

    @property
    def core(self) -> Any:  # noqa: ANN401 - vLLM's
        """The engine core, None where this process has none."""
        return self._core()

    @property
    def worker(self) -> Any:  # noqa: ANN401 - vLLM's
        """The worker itself, without vLLM's wrappers; with one GPU it is in the core's process."""
        thing = self._worker() or read_own(self.core, "model_executor.driver_worker")
        while (inner := read_own(thing, "worker")) is not None:
            thing = inner
        return thing

    @property
    def is_known(self) -> bool:
        """Whether the search is complete."""
        return self.core is not None or self._worker() is not None


def find_role(engine: EngineObjects, process_name: str) -> str:
    """Return this process's role in vLLM."""
    if engine.core is not None or process_name.startswith("EngineCore"):
        return "engine_core"
    if engine.worker is not None or process_name.startswith("VllmWorker"):
        return "worker"
    return "api_server" if process_name.startswith(("MainProcess", "ApiServer")) else "other"


def read_ranks(engine: EngineObjects) -> dict[str, int | None]:
    """Return the worker's ranks; without experts every data-parallel engine has data_parallel_rank 0."""
    parallel = read_own(engine.worker or engine.core, "vllm_config.parallel_config")
    index = read_own(parallel, "data_parallel_index")
    return {
        "rank": to_whole(read_own(engine.worker, "rank")),
        "local_rank": to_whole(read_own(engine.worker, "local_rank")),
        "data_parallel_rank": to_whole(
            read_own(parallel, "data_parallel_rank") if index is None else index
        ),
    }


def count_requests(core: object) -> dict[str, int | None]:
    """Return how many requests run and wait."""
    scheduler = read_own(core, "scheduler")
    running = read_own(scheduler, "running")
    queues = [
        read_own(scheduler, name) for name in ("waiting", "kv_holding_waiting", "skipped_waiting")
    ]
    return {
        "running": None if running is None else len(running),
        "waiting": None
        if queues[0] is None
        else sum(len(queue) for queue in queues if queue is not None),
    }


def read_scheduler(core: object) -> dict[str, int | None] | None:
    """Return the state and the limits of the scheduler; None where there is none yet."""
    scheduler = read_own(core, "scheduler")
    if scheduler is None:
        return None
    pool = read_own(scheduler, "kv_cache_manager.block_pool")
    config = read_own(core, "vllm_config")
    live, _ = _find_live_blocks(scheduler)
    free = to_whole(read_own(pool, "free_block_queue.num_free_blocks"))
    later, tokens = _find_live_blocks(
        scheduler
    )  # the scheduler goes on meanwhile: what it moved is in one of the two
    bytes_per_token = _compute_bytes_per_kv_token(
        read_own(scheduler, "kv_cache_config"), read_own(config, "parallel_config")
    )
    return {
        "kv_blocks_total": to_whole(read_own(pool, "num_gpu_blocks")),
        "kv_blocks_free": free,
        "kv_blocks_live": None if live is None or later is None else len(live | later),
        "kv_tokens_live": None
        if bytes_per_token is None
        else tokens,  # elsewhere a block may lack its first tokens
        "block_size": to_whole(read_own(scheduler, "block_size")),
        **count_requests(core),
        "steps_total": to_whole(read_own(scheduler, "current_step")),
        "max_num_seqs": to_whole(read_own(config, "scheduler_config.max_num_seqs")),
        "max_model_len": to_whole(read_own(config, "model_config.max_model_len")),
        "bytes_per_kv_token": bytes_per_token,
    }


def _find_live_blocks(scheduler: object) -> tuple[set[int] | None, int | None]:
    """Return the ids of the blocks that requests hold, and the tokens in them: only the end of a request's is empty.

    None where they are too many, or before vLLM 0.9.1, and where the tokens are not known.
    """
    requests, size = read_own(scheduler, "requests"), to_whole(read_own(scheduler, "block_size"))
    managers = read_own(scheduler, "kv_cache_manager.coordinator.single_type_managers")
    if requests is None or managers is None:
        return None, None
    held = [entry for manager in managers for entry in list(manager.req_to_blocks.items())]
    lists = [
        (requests.get(request), list(blocks)) for request, blocks in held if request in requests
    ]
    if sum(len(blocks) for _, blocks in lists) > MOST_BLOCKS:
        return None, None
    kept = [
        (request, [block.block_id for block in blocks if not block.is_null])
        for request, blocks in lists
    ]
    found = {block for _, blocks in kept for block in blocks}
    done = [
        (to_whole(read_own(request, "num_computed_tokens")), len(blocks))
        for request, blocks in kept
    ]
    empty = [blocks * size - tokens for tokens, blocks in done if size and tokens is not None]
    return found, max(0, len(found) * size - sum(empty)) if size and len(empty) == len(
        kept
    ) else None


def _compute_bytes_per_kv_token(kv: object, parallel: object) -> int | None:
    """Return the bytes of a token on all ranks; None where it depends on the layer, the position or the rank."""
    groups: list[Any] = read_own(kv, "kv_cache_groups") or []
    others = (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    )
    if len(groups) != 1 or any((read_own(parallel, name) or 1) != 1 for name in others):
        return None
    spec = groups[0].kv_cache_spec
    each = read_own(spec, "kv_cache_specs")  # of layers that differ, all in one group
    specs = list(each.values()) if each else [spec] * len(groups[0].layer_names)
    if any(FULL not in (kind.__name__ for kind in type(one).__mro__) for one in specs):
        return None
    size, rest = divmod(sum(one.page_size_bytes for one in specs), spec.block_size)
    return None if rest else to_whole(size * (read_own(parallel, "tensor_parallel_size") or 1))
