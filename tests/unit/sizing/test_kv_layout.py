"""How many bytes of KV cache a sequence takes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.sizing.models import NAMES, model
from vllm_headroom_tools.sizing.footprint import KvLayout, build_kv_layout

BATCH = 16_384


def layout(name: str, ranks: int = 1) -> KvLayout:
    return build_kv_layout(model(name), block_tokens=16, in_flight_tokens=BATCH, tensor_parallel=ranks)


@pytest.mark.parametrize(
    ("name", "ranks", "tokens", "expected"),
    [
        ("llama-3.1-70b", 1, 4_096, 1_342_177_280),
        ("llama-3.1-70b", 2, 131_072, 21_474_836_480),
        ("llama-3.1-70b-fp8-kv", 1, 32_768, 5_368_709_120),
        ("deepseek-v3", 2, 32_768, 2_302_672_896),
        ("mistral-7b-v0.1", 1, 100, 16_777_216),
        ("mistral-7b-v0.1", 1, 131_072, 2_686_451_712),
        ("gemma-2-9b", 1, 131_072, 26_074_546_176),
        ("gemma-3-27b-it", 1, 100, 72_089_600),
        ("gemma-3-27b-it", 1, 131_072, 19_301_662_720),
        ("gemma-3-4b-it", 2, 32_768, 1_406_074_880),
        ("gpt-oss-20b", 1, 131_072, 3_627_417_600),
        ("qwen3-next-80b-a3b", 1, 100, 93_585_408),
        ("qwen3-next-80b-a3b", 2, 131_072, 1_651_113_984),
        ("nemotron-nano-9b-v2", 1, 4_096, 537_395_200),
        ("tiny", 1, 4_096, 2_097_152),
    ],
)
def test_a_sequence_takes_what_vllm_reckons(name: str, ranks: int, tokens: int, expected: int) -> None:
    """Expected is `_max_memory_usage_bytes_from_groups` of vLLM 0.32, given the same layers and tokens in flight."""
    kv_layout = layout(name, ranks)

    assert kv_layout.count_blocks(tokens) * kv_layout.block_bytes == expected


def test_reference_blocks_of_llama_70b() -> None:
    kv_layout = layout("llama-3.1-70b")

    assert kv_layout.block_bytes == 5_242_880
    assert 64 * kv_layout.count_blocks(4_096) == 16_384
    assert 64 * kv_layout.count_blocks(4_096) * kv_layout.block_bytes == 80 * 2**30


def test_a_gibibyte_of_the_tiny_model_holds_the_tokens_that_vllm_reports() -> None:
    kv_layout = layout("tiny")

    assert 2**30 // kv_layout.block_bytes * kv_layout.block_tokens == 2_097_152


def test_a_block_is_as_large_as_a_state() -> None:
    assert layout("qwen3-next-80b-a3b").block_tokens == 544


@settings(deadline=None)
@given(name=st.sampled_from(NAMES), tokens=st.integers(1, 300_000))
def test_longer_sequences_take_no_less(name: str, tokens: int) -> None:
    kv_layout = layout(name)

    assert (
        kv_layout.count_blocks(tokens)
        <= kv_layout.count_blocks(tokens + 1)
        <= kv_layout.count_blocks(tokens) + kv_layout.full_groups * 2 + 16
    )


@settings(deadline=None)
@given(name=st.sampled_from(NAMES), blocks=st.integers(0, 100_000), ceiling=st.integers(1, 2**20))
def test_the_longest_sequence_fits_and_a_longer_one_does_not(name: str, blocks: int, ceiling: int) -> None:
    kv_layout = layout(name)

    longest = kv_layout.find_longest(blocks, ceiling)

    assert 0 <= longest <= ceiling
    assert longest == 0 or kv_layout.count_blocks(longest) <= blocks
    assert longest == ceiling or kv_layout.count_blocks(longest + kv_layout.block_tokens) > blocks
