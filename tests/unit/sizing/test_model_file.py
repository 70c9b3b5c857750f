"""A model's folder: its configuration, and what lies beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.unit.sizing.models import config_text, model
from vllm_headroom_tools.sizing.footprint import ModelShape
from vllm_headroom_tools.sizing.model_config import CONFIG_LIMIT_BYTES, parse_model_config, read_model

PLAIN = "llama-3.1-8b"


def read(folder: Path, name: str, quantisation_file: Any) -> ModelShape:
    (folder / "config.json").write_text(config_text(name))
    (folder / "hf_quant_config.json").write_text(
        quantisation_file if isinstance(quantisation_file, str) else json.dumps(quantisation_file)
    )
    shape = read_model(folder)
    assert isinstance(shape, ModelShape), shape
    return shape


def test_what_modelopt_wrote_beside_the_configuration_counts(tmp_path: Path) -> None:
    quantisation = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    shape = read(tmp_path, PLAIN, {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": quantisation})

    assert (shape.weight_bytes_per_parameter, shape.quantisation) == (1.0, "modelopt")
    assert shape.kv_dtype_bytes == 1.0


def test_what_the_configuration_says_itself_counts_before_it(tmp_path: Path) -> None:
    shape = read(tmp_path, "qwen2.5-7b-awq", {"quantization": {"quant_algo": "FP8"}})

    assert shape == model("qwen2.5-7b-awq")


@pytest.mark.parametrize("quantisation_file", ["", "[]", "{", {}, {"quantization": None}, {"quantization": "FP8"}])
def test_what_is_not_understood_beside_it_is_left_out(tmp_path: Path, quantisation_file: Any) -> None:
    assert read(tmp_path, PLAIN, quantisation_file) == model(PLAIN)


def test_of_a_folder_it_is_the_configuration_that_is_missing(tmp_path: Path) -> None:
    refusal = read_model(tmp_path)

    assert isinstance(refusal, str)
    assert refusal.startswith("its config.json cannot be read: No such file or directory")


@pytest.mark.parametrize("file_name", ["hf_quant_config.json", "preprocessor_config.json"])
def test_a_file_beside_it_of_many_values_is_not_parsed(tmp_path: Path, file_name: str) -> None:
    large = "{" + ",".join(f'"k{number}":1' for number in range(500_000)) + "}"
    quantised = json.dumps({"quantization": {"quant_algo": "FP8"}})
    (tmp_path / "config.json").write_text(config_text(PLAIN))
    (tmp_path / file_name).write_text(f"{quantised[:-1]},{large[1:]}")
    with mock.patch.object(json, "loads", wraps=json.loads) as loads:
        shape = read_model(tmp_path)
    assert loads.call_count == 1
    assert shape == model(PLAIN)


def test_a_file_beside_it_above_the_limit_is_not_parsed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config_text(PLAIN))
    text = json.dumps({"quantization": {"quant_algo": "FP8"}, "x": "x" * CONFIG_LIMIT_BYTES})
    (tmp_path / "hf_quant_config.json").write_text(text)

    assert read_model(tmp_path) == model(PLAIN)


def test_a_configuration_of_many_values_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{" + ",".join(f'"k{number}":1' for number in range(500_000)) + "}")

    assert "values" in str(read_model(tmp_path))


@pytest.mark.parametrize("depth", [900, 1200, 100_000])
@pytest.mark.parametrize("part", ["text_config", "x"])
def test_a_configuration_that_is_nested_deeply_is_refused(tmp_path: Path, depth: int, part: str) -> None:
    """Which step refuses it depends on Python's version."""
    (tmp_path / "config.json").write_text(f'{{"{part}":' * depth + "{}" + "}" * depth)

    assert isinstance(read_model(tmp_path), str)


def test_what_json_parses_may_be_nested_deeper_than_functions_call() -> None:
    """As json of Python 3.12 and newer does it."""
    nested: dict[str, object] = {"hidden_size": 1}
    for _ in range(20_000):
        nested = {"text_config": nested}
    with mock.patch.object(json, "loads", return_value=nested):
        assert "nested too deeply" in str(parse_model_config("{}"))
