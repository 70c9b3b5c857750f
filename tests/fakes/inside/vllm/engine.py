"""As vllm/v1/engine/core.py of 0.32, with a scheduler that has the attributes of vLLM's and takes steps."""

from __future__ import annotations

import multiprocessing
import os
import time
from types import SimpleNamespace
from typing import Any

from .plugins import load_general_plugins
from .worker import KV_BYTES, WorkerProc, WorkerWrapperBase


class FullAttentionSpec:
    block_size, page_size_bytes = 128, 32_768


class Scheduler:
    def __init__(self) -> None:
        self.current_step, self.block_size = 0, 128
        self.running, self.waiting, self.kv_holding_waiting = [object()] * 3, [object()], [object()]
        group = SimpleNamespace(layer_names=["a", "b"], kv_cache_spec=FullAttentionSpec())
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[group])
        pool = SimpleNamespace(num_gpu_blocks=16_384, free_block_queue=SimpleNamespace(num_free_blocks=16_375))
        null, *blocks = (SimpleNamespace(block_id=block_id, is_null=block_id == 0) for block_id in range(9))
        self.requests = {"a": SimpleNamespace(num_computed_tokens=256), "b": SimpleNamespace(num_computed_tokens=300)}
        held_blocks = {"a": [null, *blocks[:2]], "b": blocks[:3], "ended": blocks[3:]}  # a and b share a prefix
        coordinator = SimpleNamespace(single_type_managers=(SimpleNamespace(req_to_blocks=held_blocks),))
        self.kv_cache_manager = SimpleNamespace(block_pool=pool, coordinator=coordinator)


def config(rank: int) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(enable_sleep_mode=False, enable_cumem_allocator=False, max_model_len=2048),
        scheduler_config=SimpleNamespace(max_num_seqs=16),
        parallel_config=SimpleNamespace(
            data_parallel_rank=0, data_parallel_index=rank, tensor_parallel_size=1, pipeline_parallel_size=1
        ),
    )


class EngineCore:
    def __init__(self, vllm_config: Any, workers: int, start: str) -> None:
        load_general_plugins()
        self.vllm_config = vllm_config
        self.model_executor = SimpleNamespace()
        if workers:
            context: Any = multiprocessing.get_context(start)
            for rank in range(workers):
                name = f"VllmWorker-{rank}"
                context.Process(target=WorkerProc.worker_main, args=(vllm_config, rank), name=name, daemon=True).start()
        else:
            self.model_executor.driver_worker = WorkerWrapperBase()
            self.model_executor.driver_worker.init_worker(vllm_config, 0)
        self.scheduler = Scheduler()

    @staticmethod
    def run_engine_core(dp_rank: int, workers: int, start: str) -> None:
        engine_core = EngineCore(config(dp_rank), workers, start)
        engine_core.run_busy_loop()

    def run_busy_loop(self) -> None:
        parent, leaked = os.getppid(), []
        while os.getppid() == parent:
            self.scheduler.current_step += 1
            if os.environ.get("FAKE_LEAK"):
                leaked.append(bytearray(12_800))
            time.sleep(0.01)


__all__ = ["KV_BYTES", "EngineCore"]
