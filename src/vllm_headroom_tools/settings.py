"""The settings of commands that may read a model's configuration."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from msgspec import Struct
from pydantic import InstanceOf, PlainSerializer

from vllm_headroom.config import Settings, from_text
from vllm_headroom.daemon.model_reader import ModelReader
from vllm_headroom.inputs import parse_path
from vllm_headroom.model import TokenBytes
from vllm_headroom.units import RefusedError

if TYPE_CHECKING:
    from vllm_headroom_tools.sizing.footprint import ModelShape

TOKENS_DIFFER: Final = (
    "layers of HEADROOM_MODEL_CONFIG's model keep a window or a state, so tokens differ in size:"
    " set HEADROOM_KV_BYTES_PER_TOKEN to count in bytes"
)


class ModelFile(Struct, frozen=True, kw_only=True):
    """A model's configuration: its path and the model shape that it describes."""

    path: Path
    shape: ModelShape


# Most daemons have no model configured, so `sizing` is imported only where it is needed.


def _read_model_file(text: str) -> ModelFile:
    """Read a model's configuration.

    Raises RefusedError for an invalid configuration. The error is then reported as a mistake in the
    settings.
    """
    from vllm_headroom_tools.sizing.model_config import read_model  # noqa: PLC0415 - see above

    path = parse_path(text)
    shape = read_model(path)
    if isinstance(shape, str):
        raise RefusedError(shape)
    return ModelFile(path=path, shape=shape)


ModelConfig = Annotated[
    InstanceOf[ModelFile],
    from_text(_read_model_file),
    PlainSerializer(lambda model: str(model.path), when_used="json"),
]


def _parse_token_bytes(path: Path) -> TokenBytes | None:
    """Return a function for a model's bytes per token.

    Returns None if the model is unsupported.
    """
    from vllm_headroom_tools.sizing.footprint import (  # noqa: PLC0415 - see above
        count_engine_bytes_per_token,
    )
    from vllm_headroom_tools.sizing.model_config import read_model  # noqa: PLC0415 - see above

    shape = read_model(path)
    return None if isinstance(shape, str) else partial(count_engine_bytes_per_token, shape)


class ModelSettings(Settings):
    """The daemon's settings, with the model's configuration loaded."""

    # This is the daemon's setting `model_config_` with a different type.
    model_config_: ModelConfig | None = Settings.model_fields["model_config_"]  # type: ignore[assignment]

    @property
    def model_shape(self) -> ModelShape | None:
        """Return the model shape in `model_config_`, or None if no configuration is set."""
        return None if self.model_config_ is None else self.model_config_.shape

    @property
    def model_reader(self) -> ModelReader:
        """Return how the daemon determines the KV cache bytes per token.

        The bytes are computed from the configured model or else from the engine's model. If the
        bytes per token themselves are configured, no model is read.
        """
        if self.model_shape is None:
            is_configured = self.kv_bytes_per_token is not None
            return ModelReader(parse=None if is_configured else _parse_token_bytes)
        from vllm_headroom_tools.sizing.footprint import (  # noqa: PLC0415 - see above
            count_engine_bytes_per_token,
        )

        return ModelReader(
            configured=partial(count_engine_bytes_per_token, self.model_shape),
            problem="" if self.model_shape.has_every_token else TOKENS_DIFFER,
        )
