"""Ask one of three other calculators for the KV cache of each start; run by their own Python.

usage: python other_calculators.py NAME < starts.json > answers.json

An answer is GiB per GPU, or null where the calculator has none. All get the weights that vLLM logged, and the memory
that CUDA sees: so their answers differ by what they assume of everything else.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any

GIB = 2**30


def ask_kvfit(start: dict[str, Any]) -> float:
    """Return the budget without the weights: kvfit has no other overhead unless one is measured."""
    from kvfit.hardware import Hardware  # noqa: PLC0415 - each calculator has its own environment
    from kvfit.models import CacheComponent, CacheEstimate  # noqa: PLC0415 - see above
    from kvfit.planner import plan_topologies  # noqa: PLC0415 - see above

    # The cache of a sequence does not matter for what is left for all of them.
    cache = CacheEstimate(
        architecture="any",
        context_tokens=start["max_model_len"],
        components=(CacheComponent(name="a byte", bytes=1, detail=""),),
        kv_parallel_heads=1,
        query_heads=1,
        confidence="",
        reference="",
    )
    (layout,) = plan_topologies(
        cache,
        weight_bytes=int(start["weights_gib"] * GIB),
        hardware=Hardware(id="card", label="card", memory_gib=start["card_gib"]),
        gpus=1,
        utilization=start["utilization"],
        tensor_parallel=1,
    )
    left_bytes = layout.budget_per_rank_bytes - layout.weights_per_rank_bytes
    return float(left_bytes / GIB)


def ask_modelinfo(start: dict[str, Any]) -> float:
    from modelinfo.calculator import calculate_footprint  # noqa: PLC0415 - see above

    tensors = {"__metadata__": {"lazy_fetch": True, "total_size": start["weights_gib"] * start["gpus"] * GIB}}
    footprint = calculate_footprint(
        tensors,
        config=start["config"].get("text_config", start["config"]),
        gpu_count=start["gpus"],
        topology="nvlink",
        strategy="pp" if start["pp"] > 1 else "tp",
        is_vllm=True,
        gpu_vram_bytes=start["card_gib"] * start["gpus"] * GIB,
        gpu_util=start["utilization"],
    )
    return float(footprint["vllm_metrics"]["paged_kv_pool"] / start["gpus"] / GIB)


def ask_llm_d_planner(start: dict[str, Any]) -> float:
    from planner import capacity_planner  # noqa: PLC0415 - see above

    capacity_planner.model_memory_req = lambda *_: start["weights_gib"] * start["gpus"]
    config = json.loads(json.dumps(start["config"]), object_hook=lambda fields: SimpleNamespace(**fields))
    free_gib = capacity_planner.allocatable_kv_cache_memory(
        start["model"],
        config,
        start["card_gib"],
        start["utilization"],
        tp=start["tp"],
        pp=start["pp"],
        max_model_len=start["max_model_len"],
    )
    return float(free_gib / start["gpus"])


CALCULATORS = {"kvfit": ask_kvfit, "modelinfo-cli": ask_modelinfo, "llm-d-planner": ask_llm_d_planner}

if __name__ == "__main__":
    ask = CALCULATORS[sys.argv[1]]
    json.dump([ask(start) for start in json.load(sys.stdin)], sys.stdout)
