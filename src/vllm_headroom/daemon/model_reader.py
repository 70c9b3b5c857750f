"""How the sidecar obtains a model's bytes per token, which the tools compute."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from msgspec import Struct

from vllm_headroom.model import TokenBytes


class ModelReader(Struct, frozen=True, kw_only=True):
    """Provides the bytes per token of the operator's model or the engine's model."""

    configured: TokenBytes | None = None
    """The bytes per token of the named model. None if the operator names no model."""
    problem: str = ""
    """Why the named model's configuration does not determine the bytes per token. Empty if it does.
    """
    parse: Callable[[Path], TokenBytes | None] | None = None
    """Reads the configuration of the model that the engine's processes load. The reader is None if
    the operator configured the bytes or named a model.
    """


NO_MODEL: Final = ModelReader()
