"""What vLLM makes room for on each GPU for LoRA adapters."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.sizing.models import model
from vllm_headroom_tools.sizing.footprint import ModelShape
from vllm_headroom_tools.sizing.question import Question


def adapters(shape: ModelShape, count: int, rank: int, **question_fields: Any) -> int | None:
    return Question(shape=shape, max_loras=count, max_lora_rank=rank, **question_fields).adapters_bytes


def test_adapters_take_the_inputs_and_outputs_of_every_matrix_times_their_rank() -> None:
    shape = model("llama-3.1-8b")
    attention = (4096 + 4096) + 2 * (4096 + 1024) + (4096 + 4096)
    rank_bytes = 2 * 32 * (attention + 3 * (4096 + 14336))

    assert adapters(shape, 1, 1) == rank_bytes
    assert adapters(shape, 3, 16) == 3 * 16 * rank_bytes
    assert rank_bytes / 2 < (adapters(shape, 1, 1, tensor_parallel_size=2) or 0) < rank_bytes
    assert adapters(replace(shape, parameters=None), 1, 1) is None


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_every_expert_has_room_for_an_adapter_of_its_own(ranks: int) -> None:
    """As vLLM 0.32 makes it (lora/layers/fused_moe.py): two matrices into an expert and one out of it."""
    hidden, keys, inside, layers, experts = 4096, 1024, 14_336, 32, 8
    left_whole = 3 * hidden + hidden + experts * (2 * hidden + hidden)
    divided = (hidden + 2 * keys) + hidden + experts * (2 * inside + inside)

    expected = 4 * 64 * 2 * layers * (left_whole + divided // ranks)
    assert adapters(model("mixtral-8x7b"), 4, 64, tensor_parallel_size=ranks) == expected


def test_expert_parallelism_gives_each_gpu_some_of_the_experts_whole() -> None:
    """Of Mixtral's eight, four GPUs have two each, with all of their adapters; else a part of those of all eight."""
    shape = model("mixtral-8x7b")
    parameters = shape.parameters
    assert parameters is not None
    other_values = parameters.adapter.replicated_values + parameters.adapter.divided_values // 2
    two_engines: dict[str, Any] = {"tensor_parallel_size": 2, "data_parallel_size": 2}

    divided = adapters(shape, 1, 16, **two_engines)
    spread = adapters(shape, 1, 16, enable_expert_parallel=True, **two_engines)
    experts = 32 * 8 * 3 * (4096 + 14_336) // 4
    assert spread == 16 * 2 * (other_values + experts)
    assert divided == 16 * 2 * (other_values + 32 * 8 * 3 * (4096 + 14_336 // 4))
