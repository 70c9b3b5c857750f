"""What vLLM 0.32 itself builds of the configurations: recorded by tests/engine/truth.py, in truth.json."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest

from tests.unit.sizing.models import CHECKED, FOLDER, NAMES, config_text
from vllm_headroom_tools.sizing.footprint import ModelShape, build_kv_layout
from vllm_headroom_tools.sizing.model_config import CHECKED_MODEL_TYPES, parse_model_config

TRUTH: Final[dict[str, Any]] = json.loads((FOLDER.parent / "truth.json").read_text(encoding="utf-8"))
BUILT: Final = sorted(name for name, model_truth in TRUTH.items() if "refused" not in model_truth)
THERE: Final = {"mamba_ssm_cache_dtype": "float32"}
"""On the CPU, where the truth was taken, vLLM keeps every state in 32 bits (platforms/cpu.py)."""

NOT_AS_VLLM: Final = {"minicpm3-default"}
"""Models whose type is left unknown, since vLLM keeps more of them than their latent attention would."""

REFUSED: Final = {
    "falcon-mamba-default": "head_dim is missing",
    "llama-3.3-nemotron-super-49b-v1": "it has 80 layers and describes 2",
}


def shape(name: str) -> ModelShape:
    text = config_text(name)
    model_config = parse_model_config(text, THERE if "mamba" in text or "linear_num" in text else None)
    assert isinstance(model_config, ModelShape), model_config
    return model_config


def test_every_configuration_was_asked_for() -> None:
    assert sorted(TRUTH) == sorted((*NAMES, *(file.stem for file in CHECKED.glob("*.json"))))
    assert len(set(BUILT) - set(REFUSED) - NOT_AS_VLLM) >= 80


def test_sequences_take_the_bytes_and_the_model_has_the_parameters_that_vllm_says(subtests: pytest.Subtests) -> None:
    for name in sorted(set(BUILT) - set(REFUSED) - NOT_AS_VLLM):
        with subtests.test(name):
            truth, model_shape = TRUTH[name], shape(name)
            layout = build_kv_layout(
                model_shape,
                block_tokens=16 if model_shape.latent_width else 32,  # what vLLM's CPU backends take
                in_flight_tokens=truth["in_flight_tokens"],
                kv_dtype="bfloat16",
            )

            assert {
                tokens: layout.count_blocks(int(tokens)) * layout.block_bytes for tokens in truth["sequence_bytes"]
            } == truth["sequence_bytes"]
            assert model_shape.parameters is not None
            assert model_shape.parameters.total + (model_shape.embeddings or 0) == pytest.approx(
                truth["parameters"], rel=0.003
            )


def test_a_type_is_known_when_one_of_it_was_checked() -> None:
    types = {str(kind) for name in set(BUILT) - set(REFUSED) if (kind := model_type(name))}

    assert types - CHECKED_MODEL_TYPES == {model_type(name) for name in NOT_AS_VLLM}
    assert types >= CHECKED_MODEL_TYPES


def model_type(name: str) -> str | None:
    config = json.loads(config_text(name))
    kind = config.get("text_config", config).get("model_type", config.get("model_type"))
    return None if kind is None else str(kind)


def test_a_model_that_is_not_understood_is_refused_by_what_it_has(subtests: pytest.Subtests) -> None:
    for name in REFUSED:
        with subtests.test(name):
            model_config = parse_model_config(config_text(name))

            assert isinstance(model_config, str)
            assert model_config.endswith(REFUSED[name])


@pytest.mark.parametrize("name", ["minicpm3-default"])
def test_a_type_that_nobody_checked_is_said(name: str) -> None:
    assert shape(name).unknown_type == model_type(name)
