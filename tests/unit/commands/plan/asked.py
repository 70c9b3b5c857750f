"""Running the command within the process, and questions that tests ask."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from tests.command import read_data
from tests.unit.sizing.models import CHECKED, FOLDER, NAMES, model
from vllm_headroom.units import GIB
from vllm_headroom_tools.cli import execute
from vllm_headroom_tools.plan.command import COMMAND
from vllm_headroom_tools.sizing.estimate import MemoryEstimate, estimate_memory
from vllm_headroom_tools.sizing.question import Question


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        return read_data(self.out)

    @property
    def headline(self) -> str:
        return str(json.loads(self.out)["headline"])


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> Answer:
    """Run the command with these words."""
    status = execute(COMMAND, "plan", words)
    out, err = capsys.readouterr()
    return Answer(status=status, out=out, err=err)


def of(name: str) -> tuple[str, str]:
    return "--model-config", str((FOLDER if name in NAMES else CHECKED) / f"{name}.json")


def estimated(name: str = "llama-3.1-8b", *, card_gib: float | None = 80, **settings: Any) -> MemoryEstimate:
    card = None if card_gib is None else int(card_gib * GIB)
    shape = model(name)
    question_fields = {"max_model_len": shape.max_model_len, **settings}
    return estimate_memory(Question(shape=shape, gpu_memory_bytes=card, **question_fields))
