"""Models whose figures were computed by hand, since vLLM was not asked about them."""

from __future__ import annotations

import json
from pathlib import Path

from tests.unit.sizing.models import config_text
from vllm_headroom_tools.sizing.encoder import parse_encoder
from vllm_headroom_tools.sizing.footprint import ModelShape
from vllm_headroom_tools.sizing.model_config import CONFIG_FILE, POOLING_FILE, parse_model_config, read_model

GRANITE: dict[str, object] = {
    "model_type": "granitemoehybrid",
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "hidden_size": 1536,
    "intermediate_size": 512,
    "shared_intermediate_size": 1024,
    "num_local_experts": 64,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 40,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "layer_types": [*(["mamba"] * 9), "attention"] * 4,
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "vocab_size": 100352,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
}
"""The sizes of a Granite 4 H with 7 billion parameters."""


def shape(config: dict[str, object]) -> ModelShape:
    model_config = parse_model_config(json.dumps(config))

    assert isinstance(model_config, ModelShape), model_config

    return model_config


def test_granite_4_h_by_hand() -> None:
    """36 mixers, 4 attentions, 40 sparse layers with a shared expert; a state of 48 x 64 x 128 and 3 inputs."""
    mixer = 1536 * (2 * 3072 + 2 * 128 + 48) + 3072 * 1536
    attention = 2 * 1536 * 1536 + 2 * 1536 * 512
    sparse = 1536 * 64 + 64 * 3 * 1536 * 512 + 3 * 1536 * 1024

    model_shape = shape(GRANITE)

    assert (model_shape.full_layers, model_shape.stateful_layers, model_shape.state_checkpoints) == (4, 36, 1)
    assert model_shape.state_bytes == 2 * (48 * 64 * 128) + 2 * 3 * (3072 + 2 * 128)
    assert model_shape.parameters is not None
    assert model_shape.parameters.total == 36 * mixer + 4 * attention + 40 * sparse
    assert 6.7e9 < model_shape.parameters.total + (model_shape.embeddings or 0) < 7.1e9


def test_a_dense_granite_4_h_has_only_the_shared_mlp() -> None:
    model_shape = shape({**GRANITE, "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 8192})

    assert model_shape.parameters is not None
    assert model_shape.parameters.experts == 0
    assert model_shape.mlp_width == 8192


def test_gemma_3n_by_hand() -> None:
    """E4B: 20 of 35 layers keep anything; 2.35 of 6.84 billion parameters embed a token for each layer."""
    attention, mlp = 2 * 2048 * 8 * 256, 3 * 2048 * 16384
    per_layer = 262144 * 35 * 256 + 35 * 3 * 2048 * 256
    updates = 35 * 2 * 2048 * 64 + 6 * 2048 * 2048

    model_shape = shape(json.loads(config_text("gemma3n-text-default")))

    assert (
        model_shape.full_layers,
        model_shape.windowed_layers,
        model_shape.window_tokens,
        model_shape.unknown_type,
    ) == (4, 16, 512, None)
    assert model_shape.parameters is not None
    assert model_shape.parameters.total == 35 * (attention + mlp) + 20 * 2 * 2048 * 512 + per_layer + updates
    assert model_shape.embeddings == 262400 * 2048
    assert model_shape.parameters.unquantised >= 262144 * 35 * 256, "no method quantises an embedding"
    assert model_shape.side_values == 35 * 256 + 6 * 2048


def test_of_a_model_with_an_encoder_the_layers_of_the_decoder_count() -> None:
    """Whisper large v3 turbo names the encoder's 32 as `num_hidden_layers`; its type stays unknown."""
    sizes = {"d_model": 1280, "num_hidden_layers": 32, "encoder_layers": 32, "decoder_layers": 4}

    model_shape = shape({"model_type": "whisper", **sizes, "decoder_attention_heads": 20, "vocab_size": 51866})

    assert (model_shape.layers, model_shape.full_layers, model_shape.unknown_type) == (4, 4, "whisper")


def test_a_model_beside_which_its_pooling_lies_has_no_output_matrix(tmp_path: Path) -> None:
    """Qwen3-Embedding names itself Qwen3ForCausalLM: the matrix was 8 % too much."""
    (tmp_path / CONFIG_FILE).write_text(
        json.dumps({**json.loads(config_text("qwen3-8b")), "tie_word_embeddings": False})
    )
    model = read_model(tmp_path)
    (tmp_path / POOLING_FILE).write_text("[]")
    pooled = read_model(tmp_path)

    assert isinstance(model, ModelShape)
    assert isinstance(pooled, ModelShape)
    assert (model.embeddings, pooled.embeddings) == (2 * 151936 * 4096, 151936 * 4096)


def test_the_mergers_of_qwen3_vl_by_hand() -> None:
    """Four of them, of 4 x 1152 values to 4096: without them the model was 1.9 % too small."""
    vision = {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "spatial_merge_size": 2,
        "out_hidden_size": 4096,
        "deepstack_visual_indexes": [8, 16, 24],
    }

    encoder = parse_encoder({"model_type": "qwen3_vl", "vision_config": vision})

    assert encoder is not None
    assert encoder.parameters == 27 * (4 * 1152**2 + 2 * 1152 * 4304) + 4 * (4608**2 + 4608 * 4096)
