"""What config.json files of public models report about their sizes."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.sizing.models import NAMES, config_text, model
from vllm_headroom_tools.sizing.footprint import ModelShape
from vllm_headroom_tools.sizing.model_config import parse_model_config

PARAMETERS: Final = {
    "deepseek-v3": 671_026_404_352,
    "falcon-7b": 6_921_720_704,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-27b-it": 27_009_346_304,
    "gemma-3-4b-it": 3_880_263_168,
    "gpt-oss-20b": 20_914_757_184,
    "gpt2": 124_439_808,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-70b-fp8-kv": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "mistral-7b-v0.1": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "nemotron-nano-9b-v2": 8_888_227_328,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-7b-awq": 7_615_616_512,
    "qwen2.5-7b-gptq-int8": 7_615_616_512,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "tiny": 557_696,
}
"""Parameters of the models that transformers 5 builds from these configurations, without an image encoder's."""

KEPT: Final = {
    "gemma-2-9b": (21, 21, 4096, 0),
    "gemma-3-27b-it": (10, 52, 1024, 0),
    "gemma-3-4b-it": (5, 29, 1024, 0),
    "gpt-oss-20b": (12, 12, 128, 0),
    "mistral-7b-v0.1": (0, 32, 4096, 0),
    "nemotron-nano-9b-v2": (4, 0, None, 27),
    "qwen3-next-80b-a3b": (12, 0, None, 36),
}
"""Layers that keep every token, a window, its size, and layers with a state; of all others, every layer keeps all."""


def counted(shape: ModelShape) -> int:
    assert shape.parameters is not None
    assert shape.vocabulary is not None
    assert shape.hidden_size is not None
    return shape.parameters.total + shape.vocabulary * shape.hidden_size * (1 if shape.has_tied_embeddings else 2)


def changed(name: str, **fields: Any) -> ModelShape | str:
    return parse_model_config(json.dumps({**json.loads(config_text(name)), **fields}))


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_counted_to_a_per_cent(name: str) -> None:
    assert counted(model(name)) == pytest.approx(PARAMETERS[name], rel=0.01)


def test_every_configuration_has_its_parameters() -> None:
    assert set(PARAMETERS) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_layers_are_distinguished_by_what_they_keep(name: str) -> None:
    shape = model(name)

    expected = KEPT.get(name, (shape.layers, 0, None, 0))
    assert (shape.full_layers, shape.windowed_layers, shape.window_tokens, shape.stateful_layers) == expected
    assert shape.has_every_token is (name not in KEPT)


@pytest.mark.parametrize(
    ("name", "heads", "kv_heads", "head_size"),
    [
        ("llama-3.1-70b", 64, 8, 128),
        ("falcon-7b", 71, 1, 64),  # multi-query, in spite of num_kv_heads
        ("gpt2", 12, 12, 64),  # multi-head, by GPT-2's names
        ("gemma-2-9b", 16, 8, 256),  # a separate head size
        ("gemma-3-4b-it", 8, 4, 256),  # which the file leaves to its class
        ("qwen3-next-80b-a3b", 16, 2, 256),
    ],
)
def test_heads_are_read_by_any_name(name: str, heads: int, kv_heads: int, head_size: int) -> None:
    shape = model(name)

    assert (shape.attention_heads, shape.heads.count, shape.heads.key_size) == (heads, kv_heads, head_size)


def test_latent_attention_is_one_vector_of_latent_and_rotary_values() -> None:
    assert model("deepseek-v3").latent_width == 512 + 64


def test_a_newer_falcon_groups_its_heads() -> None:
    shape = changed("falcon-7b", new_decoder_architecture=True, num_kv_heads=8)

    assert isinstance(shape, ModelShape)
    assert shape.heads.count == 8


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("llama-3.1-8b", 131072),  # its scaling is in the length already
        ("gpt-oss-20b", 131072),
        ("deepseek-v3", 163840),
        ("gemma-3-27b-it", 131072),
        ("gpt2", 1024),
        ("falcon-7b", None),
    ],
)
def test_the_longest_sequence_is_what_vllm_takes_unless_it_is_set(name: str, length: int | None) -> None:
    assert model(name).max_model_len == length


def test_a_linear_scaling_of_positions_stretches_the_length() -> None:
    shape = changed("mistral-7b-v0.1", rope_scaling={"type": "linear", "factor": 4.0})

    assert isinstance(shape, ModelShape)
    assert shape.max_model_len == 4 * 32768


def test_a_window_that_is_switched_off_is_none() -> None:
    assert changed("qwen2.5-7b", use_sliding_window=True) != model("qwen2.5-7b")
    assert model("qwen2.5-7b").windowed_layers == 0


def test_an_image_encoder_is_counted_where_its_sizes_are_reported() -> None:
    vision_config = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27}
    siglip, untold = (
        changed("gemma-3-27b-it", vision_config=vision_config),
        changed("gemma-3-27b-it", vision_config={"x": 1}),
    )

    assert isinstance(siglip, ModelShape)
    assert isinstance(untold, ModelShape)
    assert siglip.encoder
    assert siglip.encoder.parameters == pytest.approx(417_000_000, rel=0.02)
    assert untold.encoder
    assert untold.encoder.parameters is None
    assert model("gemma-2-9b").encoder is None


@pytest.mark.parametrize(
    ("name", "state_bytes"),
    [
        ("qwen3-next-80b-a3b", 2 * (32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128))),
        ("nemotron-nano-9b-v2", 4 * 128 * 80 * 128 + 2 * 3 * (128 * 80 + 2 * 8 * 128)),  # 32 bits
        ("llama-3.1-8b", None),
    ],
)
def test_a_state_is_the_recurrent_one_and_the_last_inputs(name: str, state_bytes: int | None) -> None:
    assert model(name).state_bytes == state_bytes


@pytest.mark.parametrize(
    ("fields", "expected_layers"),
    [
        ({"layer_types": ["full_attention", "conv"] * 16}, (16, 0, 16)),
        ({"layers_block_type": ["attention"] + ["mamba"] * 31}, (1, 0, 31)),
        ({"attn_type_list": [1, 0, 0, 0] * 8}, (8, 0, 24)),
        ({"attn_layer_period": 8, "attn_layer_offset": 4, "mamba_expand": 2, "mamba_d_state": 16}, (4, 0, 28)),
        ({"sliding_window": 512, "sliding_window_pattern": 4}, (8, 24, 0)),
        ({"sliding_window": 512, "num_kv_shared_layers": 12}, (0, 20, 0)),
        ({"attention_chunk_size": 8192, "layer_types": ["chunked_attention", "full_attention"] * 16}, (16, 16, 0)),
    ],
)
def test_layers_can_be_said_by_a_list_a_pattern_or_letters(
    fields: dict[str, Any], expected_layers: tuple[int, int, int]
) -> None:
    shape = changed("llama-3.1-8b", **fields)

    assert isinstance(shape, ModelShape), shape
    assert (shape.full_layers, shape.windowed_layers, shape.stateful_layers) == expected_layers


def test_sizes_from_elsewhere_count_in_place_of_the_files() -> None:
    shape = model("falcon-7b", num_key_value_heads=2, multi_query=False, num_hidden_layers=4)

    assert (shape.heads.count, shape.full_layers) == (2, 4)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "it is not JSON: Expecting value: line 1 column 1 (char 0)"),
        ("[" * 100_000, "it is not JSON: "),
        ("[]", "it is not a model's configuration, which is a JSON object"),
        ("{}", "it is not a model's configuration that is understood here: num_hidden_layers is missing"),
        (
            '{"num_hidden_layers": 2}',
            "it is not a model's configuration that is understood here: head_dim is missing",
        ),
        (
            '{"num_hidden_layers": 2, "num_key_value_heads": 1}',
            "it is not a model's configuration that is understood here: head_dim is missing",
        ),
        (
            '{"num_hidden_layers": "two"}',
            "it is not a model's configuration that is understood here: num_hidden_layers is 'two', not a whole",
        ),
        (
            '{"num_hidden_layers": 1e999}',
            "it is not a model's configuration that is understood here: num_hidden_layers is 'inf', not a whole",
        ),
    ],
)
def test_what_is_no_configuration_is_refused_in_a_sentence(text: str, problem: str) -> None:
    shape = parse_model_config(text)

    assert isinstance(shape, str)
    assert shape.startswith(problem)
    assert "\n" not in shape


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"layer_types": ["hybrid"] * 32}, "how much a layer of kind 'hybrid' keeps is not known here"),
        ({"mamba_d_ssm": 1}, "which of its layers keep a state is not known here"),
        ({"layer_types": ["mamba"] * 32, "mamba_expand": 2, "mamba_d_state": 16}, "none of its layers has a KV cache"),
        ({"index_head_dim": 128}, "what its attention keeps in the cache is not known here: it has index_head_dim"),
    ],
)
def test_a_cache_that_is_not_understood_is_refused_rather_than_guessed(fields: dict[str, Any], problem: str) -> None:
    refusal = changed("llama-3.1-8b", **fields)

    assert isinstance(refusal, str)
    assert refusal.endswith(problem)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None)
@given(name=st.sampled_from(NAMES), data=st.data())
def test_any_value_in_a_field_gives_a_shape_or_a_sentence(name: str, data: st.DataObject) -> None:
    config = json.loads(config_text(name))
    part = config.get("text_config", config)
    field = data.draw(st.sampled_from(sorted({*part, *config, "sliding_window", "num_local_experts"})))
    (part if field in part else config)[field] = data.draw(values)

    shape = parse_model_config(json.dumps(config))

    assert isinstance(shape, ModelShape) or "\n" not in shape


def test_more_layers_than_any_model_has_are_refused_before_each_gets_a_name() -> None:
    config = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100, "intermediate_size": 64}

    shape = parse_model_config(json.dumps(config | {"num_hidden_layers": 900_000_000}))

    assert isinstance(shape, str)
    assert shape.endswith("900000000 layers are more than any model has")
