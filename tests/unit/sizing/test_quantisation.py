"""What a parameter weighs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.sizing.models import model
from vllm_headroom_tools.sizing.quantisation import (
    match_matrix_bytes,
    match_unquantised,
    read_kv_dtype_bytes,
    read_stored_bytes,
    read_weight_bytes,
)


@pytest.mark.parametrize(
    ("name", "weight_bytes", "quantisation"),
    [
        ("llama-3.1-8b", 2.0, None),
        ("deepseek-v3", 1.0, "fp8"),
        ("gpt-oss-20b", 0.53125, "mxfp4"),
        ("qwen2.5-7b-awq", 0.51953125, "awq 4-bit"),
        ("qwen2.5-7b-gptq-int8", 1.0, "gptq 8-bit"),
        ("llama-3.1-70b-fp8-kv", 1.0, "compressed_tensors 8-bit"),
        ("gemma-2-9b", 2.0, None),  # of a 32-bit checkpoint, which vLLM serves in 16
    ],
)
def test_a_parameter_weighs_what_its_quantisation_says(
    name: str, weight_bytes: float, quantisation: str | None
) -> None:
    shape = model(name)

    assert (shape.weight_bytes_per_parameter, shape.quantisation) == (weight_bytes, quantisation)


@pytest.mark.parametrize(
    ("quantisation", "expected"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, (1.0, "bitsandbytes 8-bit")),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, (0.5625, "bitsandbytes")),
        ({"quant_method": "modelopt_fp4"}, (0.5625, "modelopt_fp4")),
        ({"quant_method": "fbgemm-fp8"}, (1.0, "fbgemm_fp8")),
        ({"quant_method": "of tomorrow"}, (None, "of tomorrow")),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": None}}, (None, "compressed_tensors")),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, (0.5625, "modelopt_fp4")),
        ({"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}, (1.0, "modelopt")),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, (1.03125, "modelopt_mxfp8")),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, (None, "modelopt W4A8_AWQ")),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, (None, "modelopt mixed precision")),
        (
            {"quant_method": "modelopt", "config_groups": {"0": {"weights": {"num_bits": 4, "type": "float"}}}},
            (0.5625, "modelopt 4-bit"),
        ),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, (0.578125, "awq 4-bit")),
        ({"quant_method": "gptq", "bits": "4"}, (0.51953125, "gptq")),
        ({}, (2.0, None)),
        ("fp8", (2.0, None)),
    ],
)
def test_methods_are_known_by_bits_or_name(quantisation: Any, expected: tuple[float, str | None]) -> None:
    assert read_weight_bytes({"quantization_config": quantisation}, 2.0) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, 2.0),
        ({"dtype": "float16", "torch_dtype": "float32"}, 2.0),
        ({"torch_dtype": "torch.float32"}, 4.0),
        ({"dtype": {"text_config": "bfloat16"}}, 2.0),
        ({}, 4.0),
    ],
)
def test_a_stored_parameter_has_the_files_dtype_or_32_bits(config: dict[str, Any], expected: float) -> None:
    assert read_stored_bytes(config) == expected


@pytest.mark.parametrize(
    ("quantisation", "expected"),
    [
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, 1.0),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, 2.0),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, 1.0),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, 9 / 16),
        ({"quant_method": "fp8"}, 2.0),
        (None, 2.0),
    ],
)
def test_an_unset_cache_has_the_models_dtype_or_what_the_checkpoint_brings_scales_for(
    quantisation: Any, expected: float
) -> None:
    assert read_kv_dtype_bytes({"quantization_config": quantisation}, 2.0) == expected


@pytest.mark.parametrize(
    ("quantisation", "module", "expected"),
    [
        ({"modules_to_not_convert": ["model.layers.0.mlp.down_proj"]}, "layers.0.mlp.down_proj", True),
        ({"modules_to_not_convert": ["model.layers.0.mlp.down_proj"]}, "layers.10.mlp.down_proj", False),
        ({"modules_to_not_convert": ["model.layers.1"]}, "layers.10.mlp.down_proj", False),
        ({"modules_to_not_convert": ["model.layers.*.self_attn"]}, "layers.7.self_attn.q_proj", True),
        ({"modules_to_not_convert": ["visual"]}, "layers.7.self_attn.q_proj", False),
        ({"ignore": ["re:.*self_attn.*", "lm_head"]}, "layers.7.self_attn.q_proj", True),
        ({"ignore": ["re:^model.layers.3.mlp.*"]}, "layers.7.mlp.up_proj", False),
        ({"ignore": ["re:("]}, "layers.7.mlp.up_proj", False),
        ({"exclude_modules": ["model.language_model.layers.2.linear_attn*"]}, "layers.2.linear_attn.in_proj", True),
        ({"quant_method": "mxfp4"}, "layers.2.self_attn.q_proj", True),
        ({"quant_method": "mxfp4"}, "layers.2.mlp.experts.up_proj", False),
        ({}, "layers.2.mlp.experts.up_proj", False),
    ],
)
def test_modules_that_the_quantisation_leaves_out_are_reported_by_name(
    quantisation: Any, module: str, *, expected: bool
) -> None:
    assert match_unquantised({"quantization_config": quantisation})(module) is expected


def test_a_mixed_checkpoint_names_the_method_of_each_part_of_a_layer() -> None:
    methods = {
        "model.language_model.layers.0.mlp.experts": "W4A16_NVFP4",
        "model.language_model.layers.0.mlp.shared_expert.up_proj": "FP8",
        "backbone.layers.0.mixer.in_proj": "FP8",
        "model.layers.1.self_attn.q_proj": "MXFP8",
    }
    quantised = {name: {"quant_algo": method} for name, method in methods.items()}
    read_bytes = match_matrix_bytes({"quantization_config": {"quantized_layers": quantised}})

    assert read_bytes is not None
    assert read_bytes("layers.0.mlp.experts.up_proj") == 9 / 16
    assert read_bytes("layers.0.mlp.shared_experts.up_proj") == 1.0
    assert read_bytes("layers.0.mixer.in_proj") == 1.0
    assert read_bytes("layers.1.self_attn.o_proj") == 33 / 32
    assert read_bytes("layers.1.mlp.up_proj") is None


def test_experts_of_four_bits_lie_in_a_checkpoint_of_eight() -> None:
    read_bytes = match_matrix_bytes({"expert_dtype": "fp4", "quantization_config": {"quant_method": "fp8"}})

    assert read_bytes is not None
    assert read_bytes("layers.0.mlp.experts.up_proj") == 17 / 32
    assert read_bytes("layers.0.mlp.shared_experts.up_proj") == 1.0
