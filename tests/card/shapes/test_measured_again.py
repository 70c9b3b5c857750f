"""What is recorded of vLLM's workers is what they say again, and vLLM takes the utilization that preflight names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from tests.card.card import FOLDER, GIB, Cards, take
from tests.card.shapes.measure import RECORD, measure, measure_on
from tests.card.shapes.table import SHAPES, Shape
from tests.command import read_data, run_process

pytestmark = pytest.mark.card

AGAIN: Final = ("Llama 3.1 8B", "multilingual E5 large")
HELD_BYTES: Final = 21 * GIB
TOO_MUCH: Final = 0.02
"""More than preflight's own margin, 0.6 GiB for a context of 0.5 GiB, and its rounding to 0.01 take together."""


def test_a_model_is_sized_as_it_was(tmp_path: Path) -> None:
    recorded = json.loads(RECORD.read_text())

    for name, figures in measure([shape for shape in SHAPES if shape.name in AGAIN], tmp_path):
        assert figures == pytest.approx(recorded[name], abs=0.02)


def test_vllm_takes_the_utilization_that_preflight_names_and_not_more(tmp_path: Path) -> None:
    cards = Cards(folder=tmp_path / "cards").create()
    with take(cards, HELD_BYTES):
        answer = run_process("preflight", "--json", **cards.environment())
        highest: float = read_data(answer.stdout)["highest_gpu_memory_utilization"]
        shapes = [_ask(highest), _ask(highest + TOO_MUCH)]
        (_, enough), (_, refused) = measure_on(cards, shapes, tmp_path)

    assert "refused" not in enough
    assert "is less than desired GPU memory utilization" in refused["refused"]


def _ask(utilization: float) -> Shape:
    config: dict[str, Any] = json.loads((FOLDER / "tiny" / "config.json").read_text())
    options = ("--gpu-memory-utilization", f"{utilization:.2f}")
    return Shape(name=options[1], kind="tiny", config=config, options=options)
