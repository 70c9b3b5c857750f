"""As vllm/v1/worker/worker_base.py and vllm/v1/executor/multiproc_executor.py of 0.32."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from .plugins import load_general_plugins
from .tensors import Model, Storage, Tensor

KV_BYTES = 1 << 30


class WorkerBase:
    def __init__(self, vllm_config: Any, rank: int) -> None:
        self.vllm_config, self.rank, self.local_rank = vllm_config, rank, rank
        self.device = SimpleNamespace(type="cpu", index=None)
        halves = [Tensor(Storage(10 + half, KV_BYTES // 2)) for half in range(2)]
        self.model_runner = SimpleNamespace(model=Model(), kv_caches=[halves[0], [halves[1], halves[1]]])


class WorkerWrapperBase:
    worker: WorkerBase

    def init_worker(self, vllm_config: Any, rank: int) -> None:
        load_general_plugins()
        self.worker = WorkerBase(vllm_config, rank)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.worker, name)


class WorkerProc:
    def __init__(self, vllm_config: Any, rank: int) -> None:
        self.worker = WorkerWrapperBase()
        self.worker.init_worker(vllm_config, rank)

    @staticmethod
    def worker_main(vllm_config: Any, rank: int) -> None:
        worker = WorkerProc(vllm_config, rank)
        worker.worker_busy_loop()

    def worker_busy_loop(self) -> None:
        while True:
            time.sleep(0.01)
