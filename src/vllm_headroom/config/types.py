"""The types of settings, as pydantic checks them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, InstanceOf, PlainSerializer, SecretStr

from vllm_headroom.config.values import gpu_names, metrics_url
from vllm_headroom.sizing.model_file import read_model
from vllm_headroom.sizing.shape import ModelShape
from vllm_headroom.units import MOST_BYTES, RefusedError, size_bytes

HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
HEADER_VALUE: Final = re.compile(r"[\x21-\x7e](?:[\t\x20-\x7e]*[\x21-\x7e])?")
"""RFC 9110, 5.1 and 5.5, without the bytes beyond ASCII whose meaning is not defined."""


def lower(value: object) -> object:
    """Return text in lower case and everything else as it is."""
    return value.lower() if isinstance(value, str) else value


def _bytes(value: object) -> object:
    return size_bytes(value) if isinstance(value, str) else value


def json_mapping(value: object) -> object:
    """Return what JSON text says, and everything else as it is."""
    return json.loads(value) if isinstance(value, str) else value


def sendable(headers: dict[str, SecretStr]) -> dict[str, SecretStr]:
    """Return the headers when HTTP can carry them."""
    for name, value in headers.items():
        if not (HEADER_NAME.fullmatch(name) and HEADER_VALUE.fullmatch(value.get_secret_value())):
            raise ValueError
    return headers


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """A model's configuration: where it is, and what it says."""

    path: Path
    shape: ModelShape


def model_file(value: object) -> object:
    """Return what the file at a path says of a model; what is no path is left to the type."""
    if not isinstance(value, str | Path):
        return value
    shape = read_model(Path(value))
    if isinstance(shape, str):
        raise RefusedError(shape)
    return ModelFile(path=Path(value), shape=shape)


Url = Annotated[str, AfterValidator(metrics_url)]
Size = Annotated[int, BeforeValidator(_bytes), Field(ge=1, le=MOST_BYTES)]
Gpus = Annotated[Literal["auto", "all"] | tuple[str, ...], BeforeValidator(gpu_names)]
Model = Annotated[InstanceOf[ModelFile], BeforeValidator(model_file), PlainSerializer(lambda model: str(model.path))]
Headers = Annotated[dict[str, SecretStr], BeforeValidator(json_mapping), AfterValidator(sendable)]
LogFormat = Annotated[Literal["logfmt", "json"], BeforeValidator(lower)]
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(lower)]
