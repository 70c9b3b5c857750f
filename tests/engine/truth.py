# ruff: noqa: T201 - vLLM looks at the environment as it is imported; what is printed is the answer
"""Print what vLLM itself builds of configurations; run by the Python that vLLM is installed in.

usage: truth.py CONFIG.json...

Its lines make tests/unit/sizing/truth.json, but for `layers`, which are there to read. A line of JSON for each: the
bytes and number of its parameters, as vLLM's own classes make them on the meta device, in 16 bits, of the language
model alone; and the bytes of KV cache of sequences, as vLLM's own functions group its layers.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

os.environ |= {"VLLM_LOGGING_LEVEL": "CRITICAL", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

import no_images  # noqa: F401 - before vLLM is
import torch
from vllm.config import CacheConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe import config
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

LENGTHS = (1, 100, 4096, 32768, 131072)
MOST_TOKENS = 8192
registry._run_in_subprocess = lambda work: work()
CacheConfig.get_resolved_kv_cache_layout = lambda _: KVCacheLayout["LBNHC"]
config.current_platform = MagicMock(wraps=current_platform, is_xpu=lambda: True)  # for experts without a gate


def engine_config(path: Path) -> VllmConfig:
    """Return vLLM's configuration for the model, unquantised."""
    document = json.loads(path.read_text(encoding="utf-8"))
    for part in (document, document.get("text_config", {})):
        part.pop("quantization_config", None)
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(document), encoding="utf-8")
    return EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        language_model_only=True,
        dtype="bfloat16",
        enforce_eager=True,
        load_format="dummy",
        block_size=32,
        mamba_ssm_cache_dtype="float32",  # so does vLLM by itself, on CPUs with AVX512_BF16 alone
        max_num_batched_tokens=MOST_TOKENS,
        max_num_seqs=256,
    ).create_engine_config()


def built(path: Path) -> dict[str, Any]:
    """Return what vLLM makes of one model."""
    vllm_config = engine_config(path)
    with set_current_vllm_config(vllm_config):
        init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")  # noqa: S306 - of this process
        initialize_model_parallel(1, 1)
        with set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
            model = initialize_model(vllm_config)
        type(current_platform).update_block_size_for_backend(vllm_config)
        layers = vllm_config.compilation_config.static_forward_context
        layer_specs = {
            n: layer.get_kv_cache_spec(vllm_config)
            for n, layer in layers.items()
            if isinstance(layer, AttentionLayerBase)
        }
        shared = {
            n for n, layer in layers.items() if getattr(layer, "kv_sharing_target_layer_name", None)
        }  # keep nothing
        layer_specs = {name: spec for name, spec in layer_specs.items() if spec is not None and name not in shared}
        groups = kv_cache_utils.get_kv_cache_groups(vllm_config, layer_specs)
    weights = dict(model.named_parameters())
    return {
        "model_len": vllm_config.model_config.max_model_len,
        "block_tokens": vllm_config.cache_config.block_size,
        "in_flight_tokens": vllm_config.max_in_flight_tokens,
        "parameters": sum(weight.numel() for weight in weights.values()),
        "weights_bytes": sum(value.numel() * value.element_size() for value in weights.values()),
        "layers": dict(Counter(described(spec) for spec in layer_specs.values())),
        "sequence_bytes": {tokens: needed(vllm_config, groups, tokens) for tokens in LENGTHS},
    }


def described(spec: KVCacheSpec) -> str:
    """Return what distinguishes a layer's cache from another's."""
    sizes = ("block_size", "num_kv_heads", "head_size", "head_size_v", "sliding_window", "attention_chunk_size")
    size_texts = [f"{size}={value}" for size in (*sizes, "shapes") if (value := getattr(spec, size, None)) is not None]
    return " ".join([type(spec).__name__, *size_texts, f"page={spec.page_size_bytes}"])


def needed(vllm_config: VllmConfig, groups: list[Any], tokens: int) -> int:
    """Return vLLM's own figure for one sequence of so many tokens."""
    vllm_config.model_config.max_model_len = tokens
    return int(kv_cache_utils._max_memory_usage_bytes_from_groups(vllm_config, groups))


def answer(path: Path) -> None:
    """Print the model's line."""
    try:
        model_truth = built(path)
    except Exception as error:  # noqa: BLE001 - whatever vLLM refuses it for is the answer
        model_truth = {"refused": f"{type(error).__name__}: {error}"[-300:]}
    print(json.dumps({"name": path.stem, **model_truth}), flush=True)


for model_path in sys.argv[1:]:
    child = os.fork()  # vLLM keeps what it built in globals
    if child == 0:
        answer(Path(model_path))
        os._exit(0)
    os.waitpid(child, 0)
