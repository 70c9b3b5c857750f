"""What a model takes of a GPU."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.sizing.models import model
from vllm_headroom.model import NO_TOKEN_BYTES
from vllm_headroom_tools.sizing.footprint import (
    KV_DTYPES,
    ModelShape,
    build_kv_layout,
    count_bytes_per_token,
    count_engine_bytes_per_token,
    count_model_bytes,
    count_weights_bytes,
)
from vllm_headroom_tools.sizing.layers import KvHeads

sizes = st.integers(min_value=1, max_value=512)
plain = st.builds(
    lambda layers, kv_heads, group, size: ModelShape(
        layers=layers,
        full_layers=layers,
        attention_heads=kv_heads * group,
        heads=KvHeads(count=kv_heads, key_size=size, value_size=size),
    ),
    sizes,
    sizes,
    sizes,
    sizes,
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-3.1-70b", 327_680),
        ("llama-3.1-8b", 131_072),
        ("llama-3.1-70b-fp8-kv", 163_840),
        ("tiny", 512),
        ("gpt2", 36_864),
        ("falcon-7b", 8_192),
        ("deepseek-v3", 70_272),
        ("gemma-3-27b-it", 507_904),
        ("qwen3-next-80b-a3b", 24_576),
    ],
)
def test_bytes_per_token_of_public_models(name: str, expected: int) -> None:
    assert count_bytes_per_token(model(name)) == expected


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("auto", 327_680),
        ("bfloat16", 327_680),
        ("fp8", 163_840),
        ("fp8_e5m2", 163_840),
        ("int8_per_token_head", 80 * 8 * (256 + 8)),
        ("int4_per_token_head", 80 * 8 * (128 + 8)),
        ("nvfp4", 80 * 8 * 144),
        ("of tomorrow", None),
    ],
)
def test_the_caches_dtype_counts_and_one_that_is_not_known_is_not_guessed(dtype: str, expected: int | None) -> None:
    assert count_engine_bytes_per_token(model("llama-3.1-70b"), dtype, 1) == expected


@pytest.mark.parametrize(
    ("name", "dtype", "stages", "expected"),
    [
        # 128 + 64 + 4 bytes of a head, and four of 80 layers in 16 bits.
        ("llama-3.1-70b", "turboquant_k8v4", 1, 8 * (76 * 196 + 4 * 512)),
        ("llama-3.1-70b", "turboquant_k8v4", 2, 8 * (38 * 196 + 2 * 512)),
        # 64 + 2 + 64 + 4, and 48 + 2 + 48 + 4.
        ("llama-3.1-70b", "turboquant_4bit_nc", 1, 8 * (76 * 134 + 4 * 512)),
        ("llama-3.1-70b", "turboquant_3bit_nc", 1, 8 * (76 * 102 + 4 * 512)),
        # Beside layers with a state, all that keep tokens are packed.
        ("qwen3-next-80b-a3b", "turboquant_k8v4", 1, 12 * 2 * (256 + 128 + 4)),
    ],
)
def test_packed_heads_have_their_scales_and_the_first_and_last_layers_stay(
    name: str, dtype: str, stages: int, expected: int
) -> None:
    shape = model(name)
    layout = build_kv_layout(shape, block_tokens=16, in_flight_tokens=2048, kv_dtype=dtype, pipeline_parallel=stages)

    assert count_bytes_per_token(shape, kv_dtype=dtype, pipeline_parallel=stages) == expected
    assert layout.block_bytes == expected * layout.block_tokens or shape.stateful_layers


@pytest.mark.parametrize(
    ("name", "ranks", "expected"),
    [
        ("llama-3.1-70b", 4, 81_920),
        ("llama-3.1-70b", 8, 40_960),
        ("llama-3.1-70b", 16, 40_960),  # heads are repeated
        ("falcon-7b", 71, 8_192),
        ("deepseek-v3", 8, 70_272),  # a latent vector cannot be divided
    ],
)
def test_tensor_parallelism_divides_heads_and_repeats_what_it_cannot_divide(
    name: str, ranks: int, expected: int
) -> None:
    assert count_bytes_per_token(model(name), tensor_parallel=ranks) == expected


def test_pipeline_parallelism_divides_layers_and_the_fullest_stage_counts() -> None:
    assert count_bytes_per_token(model("llama-3.1-70b"), pipeline_parallel=3) == 27 * 4_096


@settings(deadline=None)
@given(shape=plain, ranks=sizes, stages=sizes, dtype=st.sampled_from(["auto", *KV_DTYPES]))
def test_all_ranks_together_hold_a_token_at_least_once(shape: ModelShape, ranks: int, stages: int, dtype: str) -> None:
    whole_bytes = count_bytes_per_token(shape, kv_dtype=dtype) or 0
    rank_bytes = count_bytes_per_token(shape, kv_dtype=dtype, tensor_parallel=ranks, pipeline_parallel=stages) or 0

    assert 0 < rank_bytes <= whole_bytes
    if shape.heads.count % ranks == 0 or ranks > shape.heads.count:
        assert rank_bytes * ranks * stages >= whole_bytes


@settings(deadline=None)
@given(shape=plain, ranks=st.sampled_from([1, 2, 4, 8]))
def test_bytes_per_token_grow_with_every_layer_and_head(shape: ModelShape, ranks: int) -> None:
    rank_bytes = count_bytes_per_token(shape, tensor_parallel=ranks) or 0
    larger_shape = replace(shape, heads=replace(shape.heads, count=shape.heads.count + ranks))

    assert (
        count_bytes_per_token(replace(shape, full_layers=shape.full_layers + 1), tensor_parallel=ranks)
    ) > rank_bytes
    assert (count_bytes_per_token(larger_shape, tensor_parallel=ranks) or 0) >= rank_bytes


@pytest.mark.parametrize(
    ("name", "gpus", "dtype", "expected"),
    [
        ("llama-3.1-70b", 1, "auto", 327_680),
        ("llama-3.1-70b", 8, "auto", 327_680),
        ("llama-3.1-70b", None, "auto", 327_680),
        ("llama-3.1-70b", 16, "auto", None),
        ("llama-3.1-70b", 8, "fp8", 163_840),
        ("llama-3.1-70b", 8, "fp8_ds_mla", None),
        ("deepseek-v3", 1, "auto", 70_272),
        ("deepseek-v3", 8, "auto", None),
        ("deepseek-v3", None, "auto", None),
        ("gemma-3-27b-it", 1, "auto", NO_TOKEN_BYTES),
        ("qwen3-next-80b-a3b", 1, "auto", NO_TOKEN_BYTES),
        ("mistral-7b-v0.1", 1, "auto", None),
    ],
)
def test_an_engines_bytes_per_token_are_reported_only_where_they_are_certain(
    name: str, gpus: int | None, dtype: str, expected: int | None
) -> None:
    assert count_engine_bytes_per_token(model(name), dtype, gpus) == expected


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("llama-3.1-70b", 141.1),
        ("deepseek-v3", 672.9),  # 669.2 in 8 bits and the embeddings in 16
        ("qwen2.5-7b-awq", 5.57),  # what its checkpoint weighs
        ("gemma-2-9b", 18.5),
        ("gpt-oss-20b", 13.75),  # of its checkpoint, 13.76
        ("llama-3.1-405b-instruct-fp8", 487.2),  # whose attention, first and last layer are in 16 bits
        ("kimi-k2.5", 594.8),
        ("qwen3-30b-a3b-fp8", 31.17),
        ("tiny", 0.001114),
    ],
)
def test_weights_of_public_models(name: str, gigabytes: float) -> None:
    assert (count_model_bytes(model(name)) or 0) / 1e9 == pytest.approx(gigabytes, rel=0.001)


def test_weights_that_cannot_be_counted_are_not_known_and_can_be_said() -> None:
    shape = replace(model("nemotron-nano-9b-v2"), parameters=None)

    assert count_model_bytes(shape) is None
    assert count_weights_bytes(shape) is None
    assert count_model_bytes(shape, parameters=8_888_227_328) == 2 * 8_888_227_328
    assert count_model_bytes(replace(shape, vocabulary=None), parameters=5) == 10


def test_the_first_and_the_last_stage_hold_one_embedding_each() -> None:
    shape = model("llama-3.1-70b")
    embedding = 2 * 128_256 * 8_192

    assert count_weights_bytes(shape, pipeline_parallel=2) == ceil(68_451_041_280 + embedding)


@settings(deadline=None)
@given(total=st.integers(0, 10**13), ranks=sizes, stages=sizes)
def test_ranks_hold_all_weights_between_them(total: int, ranks: int, stages: int) -> None:
    shape = model("llama-3.1-70b")
    weights_bytes = count_weights_bytes(shape, total_bytes=total, tensor_parallel=ranks, pipeline_parallel=stages)

    assert weights_bytes is not None
    assert weights_bytes * ranks * stages >= total
    assert stages > 1 or weights_bytes <= ceil(total / ranks)


def test_data_parallelism_divides_experts_alone() -> None:
    dense, sparse = model("llama-3.1-70b"), model("mixtral-8x7b")
    experts = 32 * 8 * 3 * 4096 * 14336 * 2

    assert count_weights_bytes(dense, data_parallel=4) == count_weights_bytes(dense)
    assert (count_weights_bytes(sparse) or 0) - (count_weights_bytes(sparse, data_parallel=4) or 0) == experts * 3 // 4


def test_an_encoder_keeps_nothing_and_has_no_output() -> None:
    shape = model("multilingual-e5-large")

    assert count_bytes_per_token(shape) == 0
    assert not shape.has_every_token
    assert shape.has_tied_embeddings


def test_a_type_that_nobody_checked_has_no_certain_bytes() -> None:
    assert count_engine_bytes_per_token(replace(model("llama-3.1-8b"), unknown_type="of tomorrow"), "auto", 1) is None
