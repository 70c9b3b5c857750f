"""A model as it lies in a folder: its configuration, and what its weights take."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from vllm_headroom.sizing.fields import Config
from vllm_headroom.sizing.model_config import parse_model_config
from vllm_headroom.sizing.shape import ModelShape

NAME: Final = "config.json"
QUANTISATION: Final = "hf_quant_config.json"
PREPROCESSOR: Final = "preprocessor_config.json"
LARGEST_BYTES: Final = 2**24
"""A real one is a few kB."""


INDEX: Final = "model.safetensors.index.json"
MOST_BYTES: Final = 2**53


def read_model(path: Path, overrides: Mapping[str, Any] | None = None) -> ModelShape | str:
    """Return the shape of the model of this config.json, or of the folder that has one, or what is wrong with it.

    `overrides` are fields that count in place of the file's.
    """
    try:
        file = path / NAME if path.is_dir() else path
        with file.open("rb") as stream:
            text = stream.read(LARGEST_BYTES).decode("utf-8-sig")
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        return "it is not JSON: it is no text in UTF-8"
    beside = {"preprocessor": _read(file.parent / PREPROCESSOR)}
    said = _read(file.parent / QUANTISATION).get("quantization")
    if isinstance(said, dict):  # ModelOpt 0.29 and older, under its later name
        beside["quantization_config"] = {"quant_method": "modelopt", **said}
    return parse_model_config(text, overrides, beside)


def _read(file: Path) -> Config:
    """Return what a file beside the configuration says; nothing where there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def checkpoint_bytes(folder: Path) -> int | None:
    """Return the bytes of the weights in this folder; None where there are none, or the index does not say.

    The index names them (`metadata.total_size`) also where the files themselves are not there.
    """
    metadata = _read(folder / INDEX).get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, int | float) and 0 < total < MOST_BYTES:
        return int(total)
    return _sizes(folder.glob("model*.safetensors")) or _sizes(folder.glob("*.safetensors"))


def _sizes(files: Iterable[Path]) -> int | None:
    """Return the bytes of the files, whose headers are a few kB each."""
    try:
        return sum(file.stat().st_size for file in files) or None
    except OSError:
        return None
