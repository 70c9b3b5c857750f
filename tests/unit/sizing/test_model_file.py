"""A model's folder: its configuration, and what lies beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.sizing.models import config_text, model
from vllm_headroom_tools.sizing.footprint import ModelShape
from vllm_headroom_tools.sizing.model_config import read_model

PLAIN = "llama-3.1-8b"


def read(folder: Path, name: str, beside: Any) -> ModelShape:
    (folder / "config.json").write_text(config_text(name))
    (folder / "hf_quant_config.json").write_text(beside if isinstance(beside, str) else json.dumps(beside))
    shape = read_model(folder)
    assert isinstance(shape, ModelShape), shape
    return shape


def test_what_modelopt_wrote_beside_the_configuration_counts(tmp_path: Path) -> None:
    told = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    shape = read(tmp_path, PLAIN, {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": told})

    assert (shape.weight_bytes_per_parameter, shape.quantisation) == (1.0, "modelopt")
    assert shape.kv_dtype_bytes == 1.0


def test_what_the_configuration_says_itself_counts_before_it(tmp_path: Path) -> None:
    shape = read(tmp_path, "qwen2.5-7b-awq", {"quantization": {"quant_algo": "FP8"}})

    assert shape == model("qwen2.5-7b-awq")


@pytest.mark.parametrize("beside", ["", "[]", "{", {}, {"quantization": None}, {"quantization": "FP8"}])
def test_what_is_not_understood_beside_it_is_left_out(tmp_path: Path, beside: Any) -> None:
    assert read(tmp_path, PLAIN, beside) == model(PLAIN)


def test_of_a_folder_it_is_the_configuration_that_is_missing(tmp_path: Path) -> None:
    told = read_model(tmp_path)

    assert isinstance(told, str)
    assert told.startswith("its config.json cannot be read: No such file or directory")
