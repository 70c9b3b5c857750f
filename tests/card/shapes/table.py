"""The models that a real vLLM sized on the stand-in card: their configurations and the options of both sides."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tests.unit.sizing.models import config_text

Config = Mapping[str, Any]


def read_stored(name: str, **changed: Any) -> Config:
    """Return a configuration that the tests of sizing have, with these fields."""
    return {**json.loads(config_text(name)), **changed}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model, the card, and vLLM's options: `options` for vLLM and `plan`, the others for one of them."""

    name: str
    kind: str
    config: Config
    card_gib: int = 80
    options: tuple[str, ...] = ()
    only_vllm: tuple[str, ...] = ()
    only_plan: tuple[str, ...] = ()
    release: str = "0.32"
    """The release of the plan: 0.28 is the newest whose default for some models is the first runner."""
    environment: Mapping[str, str] = field(default_factory=dict)


DEEPSEEK_V2_LITE: Final[Config] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 102400,
}

V1: Final = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
"""vLLM's first model runner, which 0.32 still takes for what its second does not have."""

TWO, FOUR = ("--tensor-parallel-size", "2"), ("--tensor-parallel-size", "4")
TEXT: Final = ("--language-model-only",)
LLAMA: Final = read_stored("llama-3.1-8b")
QWEN3_8B: Final = read_stored("qwen3-8b")

SHAPES: Final = (
    Shape(name="Llama 3.1 8B", kind="GQA", config=LLAMA),
    Shape(name="Llama 3.1 8B, V1", kind="GQA", config=LLAMA, environment=V1, release="0.28"),
    Shape(name="Llama 3.1 8B, 24 GiB", kind="GQA", config=LLAMA, card_gib=24),
    Shape(
        name="Llama 3.1 8B, 24 GiB, 32k", kind="GQA", config=LLAMA, card_gib=24, options=("--max-model-len", "32768")
    ),
    Shape(name="Llama 3.1 8B, TP 2", kind="GQA", config=LLAMA, options=TWO),
    Shape(name="Llama 3.1 70B, TP 4", kind="GQA", config=read_stored("llama-3.1-70b"), options=FOUR),
    Shape(name="Llama 3.1 70B", kind="GQA", config=read_stored("llama-3.1-70b")),
    Shape(name="Qwen2.5 7B", kind="GQA", config=read_stored("qwen2.5-7b")),
    Shape(name="Qwen2.5 7B AWQ", kind="GQA, AWQ", config=read_stored("qwen2.5-7b-awq")),
    Shape(name="Qwen3 8B, FP8", kind="GQA, FP8", config=QWEN3_8B, options=("--quantization", "fp8")),
    Shape(
        name="Qwen3 8B, small batches",
        kind="GQA",
        config=QWEN3_8B,
        options=("--max-num-batched-tokens", "1024", "--max-num-seqs", "1024"),
    ),
    Shape(name="Mistral 7B", kind="window", config=read_stored("mistral-7b-v0.1")),
    Shape(name="Gemma 2 9B", kind="window", config=read_stored("gemma-2-9b")),
    Shape(name="Gemma 3 4B, text", kind="window", config=read_stored("gemma-3-4b-it"), options=TEXT),
    Shape(name="Mixtral 8x7B, TP 2", kind="MoE", config=read_stored("mixtral-8x7b"), options=TWO),
    Shape(name="Qwen3 30B-A3B", kind="MoE", config=read_stored("qwen3-30b-a3b")),
    Shape(name="gpt-oss 20B", kind="MoE, MXFP4", config=read_stored("gpt-oss-20b")),
    Shape(name="DeepSeek V2 Lite", kind="MLA, MoE", config=DEEPSEEK_V2_LITE),
    Shape(name="Nemotron Nano 9B v2", kind="Mamba-2", config=read_stored("nemotron-nano-9b-v2")),
    Shape(
        name="Jamba Mini, TP 2",
        kind="Mamba, MoE",
        config=read_stored("jamba-default", torch_dtype="bfloat16"),
        options=TWO,
        only_plan=("--parameters", "51.6B"),
    ),
    Shape(name="multilingual E5 large", kind="encoder", config=read_stored("multilingual-e5-large")),
    Shape(
        name="Qwen3 Embedding 0.6B",
        kind="embedding",
        config=read_stored("qwen3-0.6b", max_position_embeddings=32768, vocab_size=151669),
        only_vllm=("--runner", "pooling"),
    ),
)
