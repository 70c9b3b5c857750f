"""How the sidecar gets the bytes per token of a model, which the tools compute."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from msgspec import Struct

from vllm_headroom.model import TokenBytes


class ModelReader(Struct, frozen=True, kw_only=True):
    """Gives the bytes per token of the model that the operator named, or of the engine's model."""

    configured: TokenBytes | None = None
    """The bytes per token of the named model; None if the operator names none."""
    problem: str = ""
    """Why the named model's configuration gives no bytes per token; empty if it gives them."""
    parse: Callable[[Path], TokenBytes | None] | None = None
    """Reads the configuration of the model that the engine's processes load.

    The value is None if the operator configured the bytes, or named a model.
    """


NO_MODEL: Final = ModelReader()
