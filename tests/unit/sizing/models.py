"""Configurations of public models, as their config.json says their sizes, without what nothing here reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from vllm_headroom_tools.sizing.footprint import ModelShape
from vllm_headroom_tools.sizing.model_config import parse_model_config

FOLDER: Final = Path(__file__).parent / "testdata"
NAMES: Final = sorted(file.stem for file in FOLDER.glob("*.json"))

CHECKED: Final = Path(__file__).parent / "configurations"
"""More of them, and the defaults of transformers' classes, to be compared with what vLLM makes of them."""


def config_text(name: str) -> str:
    folder = FOLDER if name in NAMES else CHECKED
    return (folder / f"{name}.json").read_text(encoding="utf-8")


def model(name: str, **overrides: Any) -> ModelShape:
    shape = parse_model_config(config_text(name), overrides)
    assert isinstance(shape, ModelShape), shape
    return shape
