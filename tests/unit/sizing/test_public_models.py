"""The table of public models."""

from __future__ import annotations

import json

import pytest

from vllm_headroom_tools.sizing.footprint import ModelShape, count_model_bytes
from vllm_headroom_tools.sizing.model_config import parse_model_config
from vllm_headroom_tools.sizing.public_models import find_public_model, list_public_models

GIGABYTES = {
    # The size of the checkpoint on the hub, in 10^9 bytes.
    "Qwen/Qwen3-0.6B": 1.19,
    "Qwen/Qwen3-32B": 65.5,
    "Qwen/Qwen3-4B": 8.04,
    "Qwen/Qwen3-14B": 29.54,
    "Qwen/Qwen2.5-3B-Instruct": 6.17,
    "Qwen/Qwen2.5-72B-Instruct": 145.4,
    "meta-llama/Llama-3.2-1B-Instruct": 2.47,
    "meta-llama/Llama-3.2-3B-Instruct": 6.43,
    "mistralai/Mistral-7B-Instruct-v0.3": 14.5,
    "mistralai/Mistral-Nemo-Instruct-2407": 24.5,
    "Qwen/Qwen3-235B-A22B": 470,
    "meta-llama/Llama-3.1-8B-Instruct": 16.06,
    "meta-llama/Llama-3.3-70B-Instruct": 141.1,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": 93.4,
    "deepseek-ai/DeepSeek-R1": 671,
}


@pytest.mark.parametrize("name", list_public_models())
def test_every_model_of_the_table_can_be_read(name: str) -> None:
    config = find_public_model(name)

    assert isinstance(parse_model_config(json.dumps(config)), ModelShape)


@pytest.mark.parametrize("name", GIGABYTES)
def test_the_weights_are_those_of_the_checkpoint(name: str) -> None:
    shape = parse_model_config(json.dumps(find_public_model(name)))

    assert isinstance(shape, ModelShape)
    weights_bytes = count_model_bytes(shape)
    assert weights_bytes == pytest.approx(GIGABYTES[name] * 1e9, rel=0.01)


def test_case_and_an_unambiguous_owner_do_not_count() -> None:
    assert find_public_model("qwen3-32b") == find_public_model("Qwen/Qwen3-32B")
    assert isinstance(find_public_model("qwen3-3"), str)


def test_a_name_that_is_empty_is_no_model() -> None:
    assert find_public_model("") == ": not a model that is known here; else --model-config with its config.json"
