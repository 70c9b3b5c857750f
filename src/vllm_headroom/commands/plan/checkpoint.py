"""The weights of a model, as they lie beside its configuration."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

INDEX: Final = "model.safetensors.index.json"
MOST_BYTES: Final = 2**53


def checkpoint_bytes(folder: Path) -> int | None:
    """Return the bytes of the weights in this folder; None where there are none, or the index does not say.

    The index names them (`metadata.total_size`) also where the files themselves are not there.
    """
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        total = index["metadata"]["total_size"]
        if isinstance(total, int | float) and 0 < total < MOST_BYTES:
            return int(total)
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        pass
    return _sizes(folder.glob("model*.safetensors")) or _sizes(folder.glob("*.safetensors"))


def _sizes(files: Iterable[Path]) -> int | None:
    """Return the bytes of the files, whose headers are a few kB each."""
    try:
        return sum(file.stat().st_size for file in files) or None
    except OSError:
        return None
