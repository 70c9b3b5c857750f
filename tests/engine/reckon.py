"""Print what vLLM itself reckons that sequences take; run by the Python that vLLM is installed in.

Standard input is a list of cases: a model's shape, the size of a block, tokens; the output is the bytes of each.
"""

import json
import sys
from types import SimpleNamespace as Settings
from typing import Any

import torch
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout


def settings(case: dict[str, Any]) -> Settings:
    """Return as much of vLLM's configuration as its reckoning looks at."""
    return Settings(
        model_config=Settings(max_model_len=case["tokens"]),
        parallel_config=Settings(
            decode_context_parallel_size=1, pipeline_parallel_size=1, tensor_parallel_size=case["ranks"]
        ),
        cache_config=Settings(
            mamba_cache_mode="align",
            num_gpu_blocks_override=None,
            get_resolved_kv_cache_layout=lambda: KVCacheLayout["LBNHC"],
        ),
        scheduler_config=Settings(disable_hybrid_kv_cache_manager=False),
        attention_config=Settings(hisparse_config=None),
        speculative_config=None,
        kv_transfer_config=None,
        max_in_flight_tokens=case["in_flight_tokens"],
    )


def specs(case: dict[str, Any]) -> dict[str, KVCacheSpec]:
    """Return what vLLM's layers would say that they keep."""
    shape, block, dtype = case["shape"], case["block_tokens"], torch.bfloat16

    def plain(heads: dict[str, int]) -> dict[str, Any]:
        sizes = {"head_size": heads["key_size"], "head_size_v": heads["value_size"]}
        return {"block_size": block, "num_kv_heads": max(1, heads["count"] // case["ranks"]), "dtype": dtype, **sizes}

    full = FullAttentionSpec(**plain(shape["heads"]))
    if shape["latent_width"]:
        full = MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=shape["latent_width"], dtype=dtype)
    layers: list[KVCacheSpec] = [full] * shape["full_layers"]
    if shape["windowed_layers"]:
        windowed = plain(shape["windowed_heads"] or shape["heads"])
        layers += [SlidingWindowSpec(**windowed, sliding_window=shape["window_tokens"])] * shape["windowed_layers"]
    if shape["stateful_layers"]:
        state = ((shape["state_bytes"] // case["ranks"] // 2,),)
        padded = full.page_size_bytes
        mamba_fields = {"page_size_padded": padded, "num_prefill_checkpoint_blocks": shape["state_checkpoints"]}
        mamba = MambaSpec(block, shapes=state, dtypes=(dtype,), mamba_cache_mode="align", **mamba_fields)
        layers += [mamba] * shape["stateful_layers"]
    return {f"layer.{number}": spec for number, spec in enumerate(layers)}


def needed_bytes(case: dict[str, Any]) -> int:
    """Return vLLM's own figure for one sequence on one GPU."""
    vllm_config = settings(case)
    groups = kv_cache_utils.get_kv_cache_groups(vllm_config, specs(case))
    return int(kv_cache_utils._max_memory_usage_bytes_from_groups(vllm_config, groups))


json.dump([needed_bytes(case) for case in json.load(sys.stdin)], sys.stdout)
