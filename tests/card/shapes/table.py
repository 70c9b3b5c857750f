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
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Config] = field(default_factory=dict)


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

GRANITE_4_H_SMALL: Final[Config] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "attention_bias": False,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 768,
    "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
    "logits_scaling": 16,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "num_local_experts": 72,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "shared_intermediate_size": 1536,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 100352,
}

FALCON_H1_7B: Final[Config] = read_stored(
    "falcon-h1-default",
    hidden_size=3072,
    intermediate_size=12288,
    num_hidden_layers=44,
    num_attention_heads=12,
    num_key_value_heads=2,
    head_dim=128,
    mamba_d_ssm=3072,
    mamba_n_heads=24,
    mamba_d_head=128,
    max_position_embeddings=262144,
    time_step_limit=[0.0, 1e30],
    torch_dtype="bfloat16",
    vocab_size=130049,
)

QWEN2_VL_7B: Final[Config] = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "image_token_id": 151655,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"},
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "video_token_id": 151656,
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": 3584,
        "in_chans": 3,
        "mlp_ratio": 4,
        "num_heads": 16,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    },
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
    "vision_token_id": 151654,
    "vocab_size": 152064,
}

V1: Final = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
"""vLLM's first model runner, which 0.32 still takes for what its second does not have."""

TWO, FOUR = ("--tensor-parallel-size", "2"), ("--tensor-parallel-size", "4")
TEXT: Final = ("--language-model-only",)
LLAMA: Final = read_stored("llama-3.1-8b")
QWEN3_8B: Final = read_stored("qwen3-8b")

SHAPES: Final = (
    Shape(name="Llama 3.1 8B", kind="GQA", config=LLAMA),
    Shape(name="Llama 3.1 8B, V1", kind="GQA", config=LLAMA, environment=V1),
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
    Shape(name="Granite 4.0 H Small", kind="Mamba-2, MoE", config=GRANITE_4_H_SMALL),
    Shape(
        name="Jamba Mini, TP 2",
        kind="Mamba, MoE",
        config=read_stored("jamba-default", torch_dtype="bfloat16"),
        options=TWO,
        only_plan=("--parameters", "51.6B"),
    ),
    Shape(name="Qwen3 Next 80B, TP 4", kind="GDN, MoE", config=read_stored("qwen3-next-80b-a3b"), options=FOUR),
    Shape(name="Falcon H1 7B", kind="Mamba-2", config=FALCON_H1_7B),
    Shape(name="multilingual E5 large", kind="encoder", config=read_stored("multilingual-e5-large")),
    Shape(
        name="Qwen3 Embedding 0.6B",
        kind="embedding",
        config=read_stored("qwen3-0.6b", max_position_embeddings=32768, vocab_size=151669),
        only_vllm=("--runner", "pooling"),
    ),
    Shape(name="Qwen2-VL 7B, text", kind="GQA", config=QWEN2_VL_7B, options=TEXT),
)
