"""A model's configuration from a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from vllm_headroom.sizing.model_config import parse_model_config
from vllm_headroom.sizing.shape import ModelShape

NAME: Final = "config.json"
LARGEST_BYTES: Final = 2**24
"""A real one is a few kB."""


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
    return parse_model_config(text, overrides)
