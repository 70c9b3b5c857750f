"""An encoder is planned as vLLM 0.32 itself profiles it (tests/engine/encoders.py), or not vouched for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.sizing.encoders import CONFIGS, TOLD, TRUTH
from tests.unit.sizing.models import CHECKED, FOLDER, config_text, model
from vllm_headroom_tools.sizing.assumptions import FORWARD_RATIO, Range, assume_start
from vllm_headroom_tools.sizing.encoder import Encoder, parse_encoder
from vllm_headroom_tools.sizing.estimate import estimate_activations
from vllm_headroom_tools.sizing.footprint import ModelShape
from vllm_headroom_tools.sizing.model_config import read_model
from vllm_headroom_tools.sizing.question import Question

RECORDED: dict[str, list[list[Any]]] = json.loads(TRUTH.read_text())


def test_every_configuration_with_an_encoder_is_compared_or_not_known() -> None:
    """Of those in the folders only Kimi's, whose images are cut by code that comes with its checkpoints."""
    texts = {path.stem: json.loads(path.read_text()) for folder in (FOLDER, CHECKED) for path in folder.glob("*.json")}
    with_one = {name for name, config in texts.items() if parse_encoder(config)}

    assert RECORDED.keys() == CONFIGS.keys()
    assert with_one - RECORDED.keys() == {"kimi-k2.5", "kimi-k3"}


def test_as_many_items_are_profiled_of_the_size_that_vllm_says(subtests: pytest.Subtests) -> None:
    for case in range(len(TOLD)):
        for name in CONFIGS:
            with subtests.test(case=case, name=name):
                encoder = parse_encoder(CONFIGS[name])
                question = Question(shape=replace(model("tiny"), encoder=encoder), **TOLD[case])
                _, tokens, items = RECORDED[name][case]

                assert question.largest_input is not None
                assert (question.largest_input.tokens, question.encoder_items) == (tokens, items)


def activations(question: Question) -> Range | None:
    return estimate_activations(question, assume_start(question))


def test_the_profiling_holds_the_largest_image_and_then_its_tokens_beside_a_batch() -> None:
    question_fields: dict[str, Any] = {"max_num_batched_tokens": 8192, "max_num_seqs": 1, "max_model_len": 32768}
    shape = model("qwen3-vl-8b-instruct")
    question, blind = (
        Question(shape=shape, **question_fields),
        Question(shape=replace(shape, encoder=None), **question_fields),
    )
    image, text = activations(question), activations(blind)
    assert image is not None
    assert text is not None
    patches, hidden, width = 4 * 16384, 1152, 4 * 1152  # the file leaves the width out

    encoding = 2 * patches * (2 * hidden + 3 * width)
    assert image.low == max(encoding, text.low + 2 * 16384 * 4 * (shape.hidden_size or 0))  # deepstack keeps four
    assert image.high >= FORWARD_RATIO.range.high * encoding


def test_a_patch_is_spread_over_gpus_at_the_low_end_alone() -> None:
    shape = model("gemma-3-27b-it", vocab_size=1, hidden_size=64)
    one_gpu, four = (
        activations(Question(shape=shape, max_num_seqs=1, max_model_len=4096, tensor_parallel_size=ranks))
        for ranks in (1, 4)
    )
    assert one_gpu is not None
    assert four is not None

    assert four.low < one_gpu.low
    assert four.high == one_gpu.high


def test_an_image_that_is_allowed_less_takes_less(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config_text("qwen3-vl-8b-instruct"))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": {"longest_edge": 2**25}}))
    larger = read_model(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"max_pixels": 1003520}))
    smaller = read_model(tmp_path)

    assert isinstance(larger, ModelShape)
    assert isinstance(smaller, ModelShape)
    assert [
        model_shape.encoder and model_shape.encoder.largest_input and model_shape.encoder.largest_input.tokens
        for model_shape in (larger, smaller)
    ] == [
        32768,
        12288,  # two frames of a video, which are then more
    ]


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "internvl", "vision_config": {"hidden_size": 1024}},
        {"model_type": "gemma3", "vision_config": {"num_hidden_layers": 27}},
        {"model_type": "qwen3_omni_moe", "thinker_config": {"audio_config": {"d_model": 1280}}},
    ],
)
def test_what_nobody_has_looked_up_is_not_known(config: dict[str, Any]) -> None:
    assert parse_encoder(config) == Encoder(parameters=None, largest_input=None)


def test_a_model_of_text_has_none() -> None:
    assert parse_encoder({"model_type": "qwen3", "hidden_size": 4096}) is None
