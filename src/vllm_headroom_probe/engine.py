"""Read attributes of the worker and the engine core in vLLM 0.9 to 0.33."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

HOLDERS = {
    "init_worker": "self",
    "__init__": "self",
    "worker_main": "worker",
    "run_engine_core": "engine_core",
}
"""vLLM functions with a variable that holds the process's worker or core. The value is the
variable's name.
"""

LOOPS = {"worker_main", "run_engine_core"}
"""The functions in HOLDERS that do not return until the process exits. Another thread can read
their few variables without keeping any tensor alive.
"""

WORKER_CLASSES = {"WorkerWrapperBase", "WorkerProc", "WorkerBase"}
CORE_CLASS = "EngineCore"
FULL_ATTENTION_CLASS = "FullAttentionSpec"
"""The class of layers that keep every token of a request in the cache. Sliding-window layers
release old tokens.
"""

WAITING_QUEUES = ("waiting", "kv_holding_waiting", "skipped_waiting")
"""The scheduler's queues of waiting requests. Only newer versions of vLLM have the second and third
queues.
"""

DIVIDING_SIZES = (
    "pipeline_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)
"""The settings for the sizes of some kinds of parallelism. With a size above 1, a token's bytes
depend on layer, position or rank.
"""

MAX_COUNTED_BLOCKS = 100_000
"""The maximum number of blocks of live requests that are counted. Counting this many takes about 10
ms.
"""

AMOUNT_LIMIT = 1 << 63
"""Our choice: a number at or above this limit is not accepted as an amount."""


def read_own(owner: object, path: str) -> Any:  # noqa: ANN401 - any object of vLLM
    """Return an instance attribute by its dotted path.

    Returns None if a part of the path is missing. Properties and `__getattr__` are not called,
    because they could run vLLM's code.
    """
    value = owner
    for name in path.split("."):
        value = getattr(value, "__dict__", {}).get(name)
    return value


def to_integer(value: Any) -> int | None:  # noqa: ANN401 - vLLM's or torch's
    """Convert a value to an integer.

    Returns None if the value is negative, too large or not a number.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return int(value) if 0 <= value < AMOUNT_LIMIT else None


class EngineObjects:
    """The worker and core of this process.

    The references are weak, so that vLLM can free the objects.
    """

    def __init__(self) -> None:
        self._worker: Callable[[], Any] = lambda: None
        self._core: Callable[[], Any] = lambda: None

    def search(self, frame: FrameType | None) -> None:
        """Search a stack for the worker and core, from this frame up."""
        while frame is not None:
            name = HOLDERS.get(frame.f_code.co_name)
            if name is not None:
                self._remember(frame.f_locals.get(name))
            frame = frame.f_back

    def search_main(self) -> None:
        """Search the main thread's stack for the worker or core.

        In a forked process, vLLM does not call the plugin. Therefore, the search is needed there.
        """
        frames = sys._current_frames()  # noqa: SLF001 - documented
        frame = frames.get(threading.main_thread().ident or 0)
        while frame is not None and frame.f_code.co_name not in LOOPS:
            frame = frame.f_back
        if frame is not None:
            self._remember(frame.f_locals.get(HOLDERS[frame.f_code.co_name]))

    def _remember(self, candidate: object) -> None:
        """Keep a reference to the object if it is a worker or core."""
        class_names = _list_class_names(candidate)
        if class_names & WORKER_CLASSES:
            self._worker = weakref.ref(candidate)
        elif CORE_CLASS in class_names:
            self._core = weakref.ref(candidate)

    @property
    def core(self) -> Any:  # noqa: ANN401 - vLLM's
        """Return the engine core, or None if it has not been found in this process."""
        return self._core()

    @property
    def worker(self) -> Any:  # noqa: ANN401 - vLLM's
        """Return the worker without vLLM's wrappers, or None if this process has none.

        With a single GPU, the worker is in the core's process. The core of such an engine has a
        reference to the worker.
        """
        worker = self._worker() or read_own(self.core, "model_executor.driver_worker")
        wrapped = read_own(worker, "worker")
        while wrapped is not None:
            worker = wrapped
            wrapped = read_own(worker, "worker")
        return worker

    @property
    def is_complete(self) -> bool:
        """Return whether the search is over because the worker or core has been found."""
        return self.core is not None or self._worker() is not None


def _list_class_names(instance: object) -> set[str]:
    return {base.__name__ for base in type(instance).__mro__}


def find_role(engine: EngineObjects, process_name: str) -> str:
    """Return this process's role in vLLM: engine_core, worker, api_server or other."""
    if engine.core is not None or process_name.startswith("EngineCore"):
        return "engine_core"
    if engine.worker is not None or process_name.startswith("VllmWorker"):
        return "worker"
    if process_name.startswith(("MainProcess", "ApiServer")):
        return "api_server"
    return "other"


def read_ranks(engine: EngineObjects) -> dict[str, int | None]:
    """Return the ranks of this process; a rank is None if unknown."""
    parallel = read_own(engine.worker or engine.core, "vllm_config.parallel_config")
    # The index is preferred. For models without experts, data_parallel_rank is 0 in every
    # data-parallel engine.
    data_parallel_rank = read_own(parallel, "data_parallel_index")
    if data_parallel_rank is None:
        data_parallel_rank = read_own(parallel, "data_parallel_rank")
    return {
        "rank": to_integer(read_own(engine.worker, "rank")),
        "local_rank": to_integer(read_own(engine.worker, "local_rank")),
        "data_parallel_rank": to_integer(data_parallel_rank),
    }


def count_requests(core: object) -> dict[str, int | None]:
    """Return the numbers of running and waiting requests; a number is None if unknown."""
    scheduler = read_own(core, "scheduler")
    running = read_own(scheduler, "running")
    queues = [read_own(scheduler, name) for name in WAITING_QUEUES]
    waiting = None
    if queues[0] is not None:
        waiting = sum(len(queue) for queue in queues if queue is not None)
    return {
        "running": None if running is None else len(running),
        "waiting": waiting,
    }


def read_scheduler(core: object) -> dict[str, int | None] | None:
    """Return the scheduler's state and limits, or None if there is no scheduler yet."""
    scheduler = read_own(core, "scheduler")
    if scheduler is None:
        return None
    pool = read_own(scheduler, "kv_cache_manager.block_pool")
    config = read_own(core, "vllm_config")
    # The scheduler keeps running during these readings and may move blocks. Therefore, live blocks
    # are read before and after the free blocks. A block that moves between the readings is
    # therefore counted as free or as live at least once.
    live_earlier = _find_live_blocks(scheduler)
    free_blocks = to_integer(read_own(pool, "free_block_queue.num_free_blocks"))
    live_later = _find_live_blocks(scheduler)
    live_blocks = None
    if live_earlier is not None and live_later is not None:
        live_blocks = len(live_earlier.block_ids | live_later.block_ids)
    bytes_per_token = _compute_bytes_per_kv_token(
        read_own(scheduler, "kv_cache_config"), read_own(config, "parallel_config")
    )
    # If the layers differ in bytes per token, a block may lack its first tokens. Tokens cannot be
    # counted without these first tokens.
    live_tokens = None
    if live_later is not None and bytes_per_token is not None:
        live_tokens = live_later.tokens
    return {
        "kv_blocks_total": to_integer(read_own(pool, "num_gpu_blocks")),
        "kv_blocks_free": free_blocks,
        "kv_blocks_live": live_blocks,
        "kv_tokens_live": live_tokens,
        "block_size": to_integer(read_own(scheduler, "block_size")),
        **count_requests(core),
        "steps_total": to_integer(read_own(scheduler, "current_step")),
        "max_num_seqs": to_integer(read_own(config, "scheduler_config.max_num_seqs")),
        "max_model_len": to_integer(read_own(config, "model_config.max_model_len")),
        "bytes_per_kv_token": bytes_per_token,
    }


class LiveBlocks(NamedTuple):
    """The blocks that requests hold."""

    block_ids: set[int]
    tokens: int | None
    """The number of tokens that the blocks hold, or None if unknown."""


def _find_live_blocks(scheduler: object) -> LiveBlocks | None:
    """Return the blocks that requests hold.

    Returns None if there are too many blocks, or if vLLM is older than 0.9.1.
    """
    requests = read_own(scheduler, "requests")
    managers = read_own(scheduler, "kv_cache_manager.coordinator.single_type_managers")
    if requests is None or managers is None:
        return None
    holdings: list[tuple[object, list[Any]]] = []
    for manager in managers:
        # The dictionary is copied. The scheduler's thread may change it at the same time.
        for request_id, blocks in list(manager.req_to_blocks.items()):
            if request_id in requests:
                holdings.append((requests.get(request_id), list(blocks)))
    if sum(len(blocks) for _, blocks in holdings) > MAX_COUNTED_BLOCKS:
        return None

    block_ids: set[int] = set()
    empty_tokens: list[int] = []
    block_size = to_integer(read_own(scheduler, "block_size"))
    for request, blocks in holdings:
        request_block_ids = [block.block_id for block in blocks if not block.is_null]
        block_ids.update(request_block_ids)
        computed_tokens = to_integer(read_own(request, "num_computed_tokens"))
        if block_size and computed_tokens is not None:
            # Only the last blocks of a request can have unused space.
            empty_tokens.append(len(request_block_ids) * block_size - computed_tokens)
    if not block_size or len(empty_tokens) < len(holdings):
        return LiveBlocks(block_ids, tokens=None)
    # A block that several requests share counts once.
    tokens = len(block_ids) * block_size - sum(empty_tokens)
    return LiveBlocks(block_ids, tokens=max(0, tokens))


def _compute_bytes_per_kv_token(cache_config: object, parallel: object) -> int | None:
    """Return the bytes per token in the KV cache, added up across all ranks.

    Returns None if the configuration is unknown. Also returns None if the bytes differ between
    tokens.
    """
    groups: list[Any] = read_own(cache_config, "kv_cache_groups") or []
    if len(groups) != 1:
        return None
    for name in DIVIDING_SIZES:
        size = read_own(parallel, name) or 1
        if size != 1:
            return None
    spec = groups[0].kv_cache_spec
    specs = [spec] * len(groups[0].layer_names)
    # Layers of different kinds may be in the same group.
    specs_by_layer = read_own(spec, "kv_cache_specs")
    if specs_by_layer:
        specs = list(specs_by_layer.values())
    if not all(FULL_ATTENTION_CLASS in _list_class_names(layer_spec) for layer_spec in specs):
        return None
    block_bytes = sum(layer_spec.page_size_bytes for layer_spec in specs)
    token_bytes, remainder = divmod(block_bytes, spec.block_size)
    if remainder:
        return None
    return to_integer(token_bytes * (read_own(parallel, "tensor_parallel_size") or 1))
