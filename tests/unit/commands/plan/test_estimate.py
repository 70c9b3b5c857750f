"""The arithmetic of the plan."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unit.commands.plan.asked import estimated
from tests.unit.sizing.models import NAMES, model
from vllm_headroom.units import GIB
from vllm_headroom_tools.plan.verdict import find_changes
from vllm_headroom_tools.sizing.assumptions import NO_BYTES
from vllm_headroom_tools.sizing.checks import CheckName, can_start, check_start
from vllm_headroom_tools.sizing.estimate import (
    estimate_memory,
    list_longest,
    list_most_sequences,
)
from vllm_headroom_tools.sizing.question import Question, choose_defaults, find_problem
from vllm_headroom_tools.sizing.releases import parse_release

COUNTED = [name for name in NAMES if model(name).parameters is not None]
questions = st.builds(
    lambda name, card, ranks, stages, length, seqs, tokens, ratio, unified: Question(
        shape=model(name),
        gpu_memory_bytes=card,
        tensor_parallel_size=ranks,
        pipeline_parallel_size=stages,
        max_model_len=length,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        gpu_memory_utilization=ratio,
        unified_memory=unified,
    ),
    st.sampled_from(COUNTED),
    st.integers(GIB, 300 * GIB),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 4),
    st.integers(1, 300_000),
    st.integers(1, 1024),
    st.integers(1024, 16384),
    st.floats(0.1, 1.0),
    st.booleans(),
)


def test_what_is_left_of_the_budget_is_the_kv_cache() -> None:
    estimate = estimated(card_gib=80, max_num_seqs=256, max_num_batched_tokens=2048)

    assert estimate.visible is not None
    assert estimate.budget_bytes == 0.92 * estimate.visible.high
    assert estimate.weights_bytes == 2 * (8_029_995_008 + 131_072 * 128)
    assert estimate.overhead is not None
    assert estimate.kv_cache is not None
    assert estimate.kv_cache.low == estimate.budget_bytes - estimate.weights_bytes - estimate.overhead.high
    assert estimate.kv_cache.high == estimate.budget_bytes - estimate.weights_bytes - estimate.overhead.low


def test_a_start_up_log_lies_within_the_estimate() -> None:
    """Llama 3.1 8B, vLLM 0.31, an A100 of 79.25 GiB: 1.44 GiB for activations and graphs, 56.21 for 460,496 tokens."""
    estimate = estimated(card_gib=79.25, max_num_seqs=256, max_num_batched_tokens=2048, release=parse_release("0.31"))

    assert estimate.kv_cache is not None
    assert estimate.overhead is not None
    assert estimate.kv_cache.low <= 56.21 * GIB <= estimate.kv_cache.high
    assert estimate.overhead.low <= 1.70 * GIB <= estimate.overhead.high
    assert estimate.capacity_tokens is not None
    assert 0.96 * 460_496 <= estimate.capacity_tokens <= 460_496


def test_a_server_with_reported_memory_has_exactly_these_blocks() -> None:
    estimate = estimated("tiny", card_gib=24, kv_cache_memory_bytes=GIB)

    assert (estimate.capacity_tokens, estimate.blocks, estimate.budget_bytes) == (2_097_152, 131_072, None)
    assert estimate.count_sequences(4096) == 512
    assert can_start(estimate) is True


@pytest.mark.parametrize(
    ("card_gib", "ratio", "expected"), [(80, 0.92, True), (80, 1.0, False), (8, 0.95, True), (8, 0.995, False)]
)
def test_what_lies_beside_the_budget_has_to_fit_as_well(card_gib: int, ratio: float, expected: bool) -> None:  # noqa: FBT001 - a case
    estimate = estimated("tiny", card_gib=card_gib, gpu_memory_utilization=ratio, max_num_seqs=16)

    assert can_start(estimate) is expected


@pytest.mark.parametrize(
    ("card_gib", "expected"), [(18.0, True), (16.8, None), (15.4, None), (15.2, False), (None, None)]
)
def test_reported_memory_has_to_fit_on_the_card_with_everything_else(
    card_gib: float | None,
    expected: bool | None,  # noqa: FBT001 - a case
) -> None:
    """14.96 GiB of weights, 0.1 of cache, 0.26 to 2.8 of everything else."""
    estimate = estimated(
        "llama-3.1-8b",
        card_gib=card_gib,
        kv_cache_memory_bytes=GIB // 10,
        max_model_len=256,
        max_num_seqs=1,
        max_num_batched_tokens=512,
    )

    assert can_start(estimate) is expected


def test_reported_memory_that_is_too_little_does_not_fit_on_any_card() -> None:
    assert can_start(estimated(card_gib=None, kv_cache_memory_bytes=GIB)) is False


def test_llama_70b_has_the_reference_figures() -> None:
    estimate = estimated("llama-3.1-70b", max_model_len=4096, max_num_seqs=64)

    assert estimate.bytes_per_token == 327_680
    assert 64 * estimate.count_sequence_bytes(4096) == 80 * GIB
    assert can_start(estimate) is False


def test_windows_let_more_tokens_in_than_bytes_per_token_say() -> None:
    estimate = estimated("gemma-3-27b-it", card_gib=141, max_num_batched_tokens=2048)

    assert estimate.capacity_tokens is not None
    assert estimate.kv_cache is not None
    assert estimate.capacity_tokens * estimate.bytes_per_token > estimate.kv_cache.high


def test_eager_mode_needs_no_graphs() -> None:
    assert estimated(enforce_eager=True).graphs == NO_BYTES
    assert estimated().graphs != NO_BYTES


def test_activations_follow_the_batch_and_the_logits_whichever_is_larger() -> None:
    small = estimated(max_num_seqs=1, max_num_batched_tokens=1024).activations
    large = estimated(max_num_seqs=1024, max_num_batched_tokens=1024).activations

    assert small is not None
    assert large is not None
    assert small.low == 1024 * 2 * (2 * 4096 + 3 * 14336)
    assert large.low == 1.5 * 1024 * 128_256 * 4


def test_without_a_size_what_depends_on_it_is_not_known() -> None:
    untold = replace(model("llama-3.1-8b"), hidden_size=None)
    estimate = estimate_memory(Question(shape=untold, gpu_memory_bytes=80 * GIB, max_model_len=8))

    assert (estimate.activations, estimate.weights_bytes, estimate.kv_cache, can_start(estimate)) == (
        None,
        None,
        None,
        None,
    )
    assert (list_longest(estimate), list_most_sequences(estimate)) == ([], [])


@pytest.mark.parametrize(
    ("card_gib", "expected"), [(None, (1024, 8192)), (24, (256, 2048)), (80, (1024, 8192)), (192, (1024, 16384))]
)
def test_batches_are_vllms_for_a_card_of_this_size(card_gib: int | None, expected: tuple[int, int]) -> None:
    defaults = choose_defaults(None if card_gib is None else card_gib * GIB)

    assert (defaults.max_num_seqs, defaults.max_num_batched_tokens) == expected


@pytest.mark.parametrize(
    ("name", "question_fields", "problem"),
    [
        (
            "llama-3.1-70b",
            {"tensor_parallel_size": 3},
            "--tensor-parallel-size 3 does not divide the model's 64 attention heads",
        ),
        (
            "qwen2.5-7b",
            {"tensor_parallel_size": 7},
            "--tensor-parallel-size 7 and the model's 4 KV heads: one has to divide the other",
        ),
        ("tiny", {"pipeline_parallel_size": 3}, "--pipeline-parallel-size 3 is more than the model's 2 layers"),
        (
            "tiny",
            {"max_num_seqs": 256, "max_num_batched_tokens": 128},
            "--max-num-batched-tokens 128 is less than --max-num-seqs 256",
        ),
        ("deepseek-v3", {"tensor_parallel_size": 16}, None),
        ("qwen2.5-7b", {"tensor_parallel_size": 28}, None),
    ],
)
def test_what_vllm_refuses_is_refused(name: str, question_fields: dict[str, Any], problem: str | None) -> None:
    assert find_problem(Question(shape=model(name), **question_fields)) == problem


@settings(deadline=None)
@given(question=questions)
def test_what_is_planned_is_within_the_budget(question: Question) -> None:
    estimate = estimate_memory(question)

    assert estimate.blocks is not None
    assert estimate.budget_bytes is not None
    assert estimate.weights_bytes is not None
    assert estimate.overhead is not None
    cache = estimate.blocks * estimate.layout.block_bytes
    assert cache == 0 or cache + estimate.weights_bytes + estimate.overhead.high <= estimate.budget_bytes
    if question.shape.has_every_token:
        assert (estimate.capacity_tokens or 0) * estimate.bytes_per_token <= max(cache, 0)
    for sequences, length in list_longest(estimate):
        assert length == 0 or sequences * estimate.count_sequence_bytes(length) <= cache
    for length, sequences in list_most_sequences(estimate):
        assert sequences * estimate.count_sequence_bytes(length) <= cache


@settings(deadline=None)
@given(question=questions)
def test_it_fits_exactly_when_every_check_of_a_start_passes(question: Question) -> None:
    estimate = estimate_memory(question)
    assert estimate.kv_cache is not None
    assert question.max_model_len is not None

    needed = estimate.count_sequence_bytes(question.max_model_len)
    answers = {check.name: check.passes for check in check_start(estimate)}
    if can_start(estimate) is True:
        assert estimate.kv_cache.low >= needed
        assert estimate.blocks
        assert set(answers.values()) == {True}
    elif can_start(estimate) is False:
        assert False in answers.values()
    else:
        assert None in answers.values()
    assert (answers[CheckName.LONGEST_SEQUENCE] is False) is (estimate.kv_cache.high < needed)


@settings(deadline=None)
@given(question=questions, extra_bytes=st.integers(1, 100 * GIB))
def test_a_larger_card_holds_no_less(question: Question, extra_bytes: int) -> None:
    small = estimate_memory(question)
    large = estimate_memory(replace(question, gpu_memory_bytes=(question.gpu_memory_bytes or 0) + extra_bytes))

    assert (large.blocks or 0) >= (small.blocks or 0)
    assert can_start(small) is not True or can_start(large) is True


@settings(deadline=None)
@given(question=questions)
def test_every_change_that_is_named_lets_it_start(question: Question) -> None:
    fields: dict[str, tuple[str, Any]] = {
        "--max-model-len": ("max_model_len", int),
        "--max-num-seqs": ("max_num_seqs", int),
        "--max-num-batched-tokens": ("max_num_batched_tokens", int),
        "--enforce-eager": ("enforce_eager", lambda _: True),
        "--gpu-memory-utilization": ("gpu_memory_utilization", float),
        "--kv-cache-dtype": ("kv_cache_dtype", str),
        "--tensor-parallel-size": ("tensor_parallel_size", int),
    }
    for change in find_changes(estimate_memory(question)):
        changed = question
        for option, value in change.settings:
            if option == "--quantization":
                shape = replace(question.shape, weight_bytes_per_parameter=1.0, quantisation=value)
                changed = replace(changed, shape=shape)
            else:
                field, kind = fields[option]
                changed = replace(changed, **{field: kind(value)})

        assert find_problem(changed) is None
        assert can_start(estimate_memory(changed)) is True
