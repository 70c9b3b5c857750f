"""The architectures of 2026: their parameters against public figures, and what they keep of a token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_headroom_tools.sizing.encoder import parse_encoder
from vllm_headroom_tools.sizing.footprint import (
    ModelShape,
    build_kv_layout,
    count_bytes_per_token,
    count_engine_bytes_per_token,
    count_model_bytes,
)
from vllm_headroom_tools.sizing.model_config import parse_model_config
from vllm_headroom_tools.sizing.public_models import find_public_model
from vllm_headroom_tools.sizing.question import Question

BILLIONS = {
    # Parameters by the makers' pages, without the heads for speculation.
    "deepseek-ai/DeepSeek-V3.2": 671.9,
    "deepseek-ai/DeepSeek-V4-Flash": 284,
    "zai-org/GLM-5": 744,
    "zai-org/GLM-5.2": 743.4,
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": 549.3,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31.6,
    "moonshotai/Kimi-K2.5": 1026.8,
    "moonshotai/Kimi-K3": 2780,
    "MiniMaxAI/MiniMax-M3": 428,
    "XiaomiMiMo/MiMo-7B-Base": 7.6,
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": 107.8,
}


def read(name: str, **fields: Any) -> ModelShape:
    config = find_public_model(name)
    assert not isinstance(config, str), config
    shape = parse_model_config(json.dumps({**config, **fields}))
    assert isinstance(shape, ModelShape), shape
    return shape


@pytest.mark.parametrize("name", BILLIONS)
def test_the_parameters_are_those_that_the_maker_publishes(name: str) -> None:
    shape = read(name)

    assert shape.unknown_type is None
    assert shape.parameters is not None
    encoder = 0
    if shape.encoder is not None:
        encoder = shape.encoder.parameters or 0
    total = shape.parameters.total + (shape.embeddings or 0) + encoder
    assert total / 1e9 == pytest.approx(BILLIONS[name], rel=0.005)


def test_sparse_attention_keeps_its_index_beside_the_latents() -> None:
    v32 = read("deepseek-ai/DeepSeek-V3.2")
    shared = read("zai-org/GLM-5.2")

    # 61 layers x (576 values x 2 bytes + 128 bytes and a scale of 4); the index is whole on every GPU.
    assert count_bytes_per_token(v32) == 61 * (1152 + 132)
    assert count_bytes_per_token(v32, tensor_parallel=8) == 61 * (1152 + 132)
    assert count_bytes_per_token(v32, kv_dtype="fp8") == 61 * (656 + 132)
    assert count_bytes_per_token(v32, kv_dtype="fp8_ds_mla") == 61 * (656 + 132)
    # Of GLM-5.2's 78 layers 21 have an index, which the others use.
    assert count_bytes_per_token(shared) == 78 * 1152 + 21 * 132
    layout = build_kv_layout(v32, block_tokens=16, in_flight_tokens=8192)
    assert (layout.block_tokens, layout.block_bytes) == (64, 64 * 61 * (1152 + 132))


def test_block_sparse_attention_keeps_an_index_of_16_bits() -> None:
    shape = read("MiniMaxAI/MiniMax-M3")

    # 60 layers x 4 KV heads x 256 values x 2 bytes, and 57 layers x 128 values x 2 bytes.
    assert count_bytes_per_token(shape) == 60 * 2048 + 57 * 256
    assert count_bytes_per_token(shape, tensor_parallel=4) == 60 * 512 + 57 * 256
    # The index is whole on every GPU, so the bytes on all GPUs together depend on their number.
    assert count_engine_bytes_per_token(shape, "auto", 4) is None


def test_layers_of_delta_attention_keep_a_state_in_32_bits() -> None:
    shape = read("moonshotai/Kimi-K3")

    # 96 heads x 128 x 128 values of 4 bytes, and 3 x 12,288 inputs of 3 tokens in 2 bytes.
    assert (shape.full_layers, shape.stateful_layers) == (24, 69)
    assert shape.state_bytes == 96 * 128 * 128 * 4 + 3 * 12_288 * 3 * 2


def test_a_compressed_cache_is_divided_as_vllm_divides_it() -> None:
    """By hand from vLLM 0.33's planning: 21 layers with ratio 4, 20 with 128, 43 windows of 128 tokens."""
    shape = read("deepseek-ai/DeepSeek-V4-Flash")
    layout = build_kv_layout(shape, block_tokens=16, in_flight_tokens=16_384, tensor_parallel=8)

    # 584 bytes a latent and 132 an index; 64 latents of 256 tokens, or 2, padded to multiples of 576.
    assert layout.block_bytes == 21 * (65 * 576 + 15 * 576) + 20 * 3 * 576
    # One group of latents; 2 of windows, 1 and 1 of states: 4,096 + 2 x 259 + 4,099 + 2,065 blocks.
    assert layout.count_blocks(1_048_576) == 4096 + 2 * 259 + 4099 + 2065
    assert count_bytes_per_token(shape, tensor_parallel=8) == -(-(21 * 716 * 32 + 20 * 584) // 128)


def test_another_compression_is_refused() -> None:
    config = find_public_model("deepseek-ai/DeepSeek-V4-Flash")
    assert not isinstance(config, str)

    assert str(parse_model_config(json.dumps({**config, "compress_ratios": [8] * 44}))).endswith(
        "compresses 8 tokens into one"
    )
    assert str(parse_model_config(json.dumps({**config, "compress_ratios": [4]}))).endswith("no ratio for each layer")


def test_an_index_of_another_attention_is_refused() -> None:
    config = find_public_model("Qwen/Qwen3-8B")
    assert not isinstance(config, str)
    shape = parse_model_config(json.dumps({**config, "index_head_dim": 128}))

    assert shape == "what its attention keeps in the cache is not known here: it has index_head_dim"


@pytest.mark.parametrize(
    ("fields", "rows", "values"),
    [
        ({"rope_theta": 1e6}, 40_960, 128),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 8 * 40_960, 128),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 40_960, 128),
        ({"rope_parameters": {"mrope_section": [24, 20, 20], "rope_type": "default"}}, 4 * 40_960, 128),
        ({"rope_theta": 1e6, "partial_rotary_factor": 0.25}, 40_960, 32),
        ({"model_type": "llama"}, 40_960, 128),
        ({"rope_scaling": None}, 0, 0),
        ({"model_type": "gpt2"}, 0, 0),
    ],
)
def test_the_table_of_positions_has_a_row_for_each(fields: dict[str, Any], rows: int, values: int) -> None:
    assert read("Qwen/Qwen3-8B", **{"rope_theta": None, **fields}).position_values == rows * values


GEMMA_3_12B = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    "vision_config": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "model_type": "siglip_vision_model",
    },
}


def test_weights_are_as_real_starts_logged_them() -> None:
    """Gemma 3 12B on an H100, vLLM 0.19: 23.31 GiB, of which 0.56 are two tables of positions."""
    shape = parse_model_config(json.dumps(GEMMA_3_12B))

    assert isinstance(shape, ModelShape)
    weights_bytes = count_model_bytes(shape)
    assert weights_bytes is not None
    assert (weights_bytes + shape.position_bytes) / 2**30 == pytest.approx(23.31, rel=0.005)


def test_experts_in_mxfp4_are_padded() -> None:
    """gpt-oss 120B on an H100: 65.97 GiB; gpt-oss 20B on an A100, vLLM 0.19: 13.72 GiB (public logs)."""
    for name, logged_gib in (("openai/gpt-oss-120b", 65.97), ("openai/gpt-oss-20b", 13.72)):
        question = Question(shape=read(name))

        assert question.weights_bytes is not None
        assert question.weights_bytes / 2**30 == pytest.approx(logged_gib, rel=0.005)


def test_each_matrix_of_a_mixed_checkpoint_has_its_own_bytes() -> None:
    layers = range(36)
    quantised = {f"model.layers.{layer}.mlp.up_proj": {"quant_algo": "W4A16_NVFP4"} for layer in layers}
    quantised |= {f"model.layers.{layer}.self_attn.q_proj": {"quant_algo": "FP8"} for layer in layers}
    quantised["lm_head"] = {"quant_algo": "W4A16_NVFP4"}
    quantisation = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": quantised}
    shape = read("Qwen/Qwen3-8B", quantization_config=quantisation)

    attention = 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    mlp = 36 * 3 * 4096 * 12_288
    vocabulary = 151_936 * 4096
    assert count_model_bytes(shape) == pytest.approx(attention + mlp * 9 / 16 + vocabulary * (2 + 9 / 16))


def test_the_encoders_of_gemma_4_are_counted_from_their_sizes() -> None:
    """The makers' page: E4B has about 150 million parameters for images and 300 million for sound."""
    vision = {
        "model_type": "gemma4_vision",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 16,
        "position_embedding_size": 10_240,
    }
    audio = {"model_type": "gemma4_audio", "hidden_size": 1024, "num_hidden_layers": 12, "output_proj_dims": 1536}
    seeing = parse_encoder({"model_type": "gemma4", "vision_config": vision})
    hearing = parse_encoder({"model_type": "gemma4", "audio_config": audio})

    assert seeing is not None
    assert hearing is not None
    assert seeing.parameters == pytest.approx(150e6, rel=0.15)
    assert hearing.parameters == pytest.approx(300e6, rel=0.05)


def test_a_vision_chunk_of_kimi_is_the_largest_item() -> None:
    encoder = read("moonshotai/Kimi-K2.5").encoder

    assert encoder is not None
    assert encoder.largest_input is not None
    assert encoder.largest_input.tokens == 4096


SHARED_LAYERS = Path(__file__).with_name("configurations") / "gemma4-shared-layers.json"


def read_gemma_4(override: dict[str, Any], **fields: Any) -> ModelShape | str:
    """Read Gemma 4 as transformers 5.24 saves it, with an override for each layer that keeps all tokens."""
    config = json.loads(SHARED_LAYERS.read_text(encoding="utf-8"))
    del config["global_head_dim"]
    full_layers = [layer for layer, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
    overrides = {str(layer): override for layer in full_layers}
    return parse_model_config(json.dumps({**config, "per_layer_config": overrides, **fields}))


def test_heads_that_are_overridden_for_whole_layers_are_those_of_the_older_fields() -> None:
    older = json.loads(SHARED_LAYERS.read_text(encoding="utf-8"))
    fewer = {**older, "attention_k_eq_v": True, "num_global_key_value_heads": 2}

    assert read_gemma_4({"head_dim": 512}) == parse_model_config(json.dumps(older))
    assert read_gemma_4({"head_dim": 512, "num_key_value_heads": 2}, attention_k_eq_v=True) == parse_model_config(
        json.dumps(fewer)
    )


@pytest.mark.parametrize(
    ("override", "fields"),
    [
        ({"head_dim": 512, "intermediate_size": 100}, {}),
        ({"head_dim": 512}, {"per_layer_config": {"0": {"head_dim": 512}}}),
        ({"head_dim": 512}, {"per_layer_config": {"0": 512}}),
        ({"head_dim": 512}, {"per_layer_config": [1]}),
        ({"head_dim": 512}, {"layer_types": None}),
    ],
)
def test_other_overrides_of_layers_are_refused(override: dict[str, Any], fields: dict[str, Any]) -> None:
    refused = read_gemma_4(override, **fields)

    assert isinstance(refused, str)
    assert "per_layer_config" in refused or "not a model's configuration" in refused
