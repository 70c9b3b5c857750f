"""How the bytes per token of a model are found: what computes them is no part of the sidecar."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from msgspec import Struct

from vllm_headroom.model import TokenBytes


class ModelReader(Struct, frozen=True, kw_only=True):
    """The bytes per token of the model that the operator named, or of the engine's own."""

    configured: TokenBytes | None = None
    """Of the named model; None where none is named."""
    problem: str = ""
    """Why the named model's configuration gives no bytes per token; empty where it does."""
    parse: Callable[[Path], TokenBytes | None] | None = None
    """Reads the configuration of the model that the engine's processes load.

    None where the operator configured the bytes, or named a model.
    """


NO_MODEL: Final = ModelReader()
