"""The simulated engine's page: what the daemon reads of vLLM's, under the names of 0.32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from vllm_headroom.commands.demo.engine import Engine
from vllm_headroom.commands.demo.traffic import BLOCK_TOKENS, CAPACITY_TOKENS, KV_BLOCKS
from vllm_headroom.commands.demo.world import World
from vllm_headroom.model import Failure
from vllm_headroom.vocabulary import Reason, Source

OF_THE_ENGINE: Final = 'model_name="simulated-8b",engine="0"'
CACHE_CONFIG: Final = (
    f'engine="0",block_size="{BLOCK_TOKENS}",cache_dtype="auto",gpu_memory_utilization="0.92",'
    f'kv_cache_memory_bytes="None",kv_cache_size_tokens="{CAPACITY_TOKENS}",num_gpu_blocks="{KV_BLOCKS}"'
)
DOWN: Final = Failure(source=Source.ENGINE, reason=Reason.HTTP_STATUS, message="the simulated engine is down")


class SimulatedEngine:
    """The page of the world that `now` returns, brought to the present; `epoch_seconds` is when the demo began."""

    def __init__(self, now: Callable[[], World], epoch_seconds: float) -> None:
        self._now = now
        self._epoch_seconds = epoch_seconds

    async def fetch(self) -> str | Failure:
        """Return the page, which there is none of while the engine is down or loads."""
        world = self._now()
        return page(world.engine, self._epoch_seconds) if world.serves else DOWN

    async def close(self) -> None:
        """Do nothing: there is no connection."""


def page(engine: Engine, epoch_seconds: float) -> str:
    """Return what the engine tells, as Prometheus text."""
    traffic = engine.traffic
    figures = {
        "num_requests_running": traffic.running,
        "num_requests_waiting": traffic.waiting,
        "kv_cache_usage_perc": traffic.kv_used_ratio,
        "prefix_cache_queries_total": traffic.prompt_tokens_total,
        "prefix_cache_hits_total": traffic.prefix_hits_total,
        "num_preemptions_total": traffic.preemptions_total,
        "prompt_tokens_total": traffic.prompt_tokens_total,
        "generation_tokens_total": traffic.generation_tokens_total,
        "request_success_total": traffic.finished_total,
        "iteration_tokens_total_count": traffic.steps_total,
    }
    lines = [f"vllm:{name}{{{OF_THE_ENGINE}}} {value}" for name, value in figures.items()]
    lines += [
        f'vllm:engine_sleep_state{{{OF_THE_ENGINE},sleep_state="awake"}} {int(not engine.asleep)}',
        f"vllm:cache_config_info{{{CACHE_CONFIG}}} 1",
        f"process_start_time_seconds {epoch_seconds + engine.started_seconds}",
    ]
    return "".join(f"{line}\n" for line in lines)
