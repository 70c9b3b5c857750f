"""What an operator writes for a setting, understood: text → value, or ValueError."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, InstanceOf, PlainSerializer, SecretStr

from vllm_headroom.sizing.model_file import read_model
from vllm_headroom.sizing.shape import ModelShape
from vllm_headroom.units import size_bytes

LAST_PORT: Final = 65535
GPU: Final = re.compile(r"0|[1-9]\d*|(?:GPU|MIG)-[0-9A-Za-z/-]+", re.ASCII)
HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
HEADER_VALUE: Final = re.compile(r"[\x21-\x7e](?:[\t\x20-\x7e]*[\x21-\x7e])?")
"""RFC 9110, 5.1 and 5.5, without the bytes beyond ASCII whose meaning is not defined."""


def lower(value: object) -> object:
    """Return text in lower case and everything else as it is."""
    return value.lower() if isinstance(value, str) else value


def metrics_url(value: str) -> str:
    """Return an http or https URL, with /metrics where it has no path."""
    import httpx  # noqa: PLC0415 - it decides what it can fetch, but --help need not wait for it

    try:
        url = httpx.URL(value)
    except httpx.InvalidURL as error:
        raise ValueError from error
    if url.scheme not in {"http", "https"} or not url.host or re.search(r"\s", value):
        raise ValueError
    if url.port is not None and not 1 <= url.port <= LAST_PORT:
        raise ValueError
    return str(url.copy_with(path="/metrics")) if url.path == "/" else value


def gpu_names(value: object) -> object:
    """Return `auto`, `all`, or the tuple of indices and UUIDs of a list or a text with commas."""
    names = value.split(",") if isinstance(value, str) else value
    if isinstance(value, str) and value.lower() in {"auto", "all"}:
        return value.lower()
    if names in (["auto"], ["all"]):
        return names[0]
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError
    stripped = tuple(name.strip() for name in names)
    if not all(GPU.fullmatch(name) for name in stripped):
        raise ValueError
    return stripped


def json_mapping(value: object) -> object:
    """Return what JSON text says, and everything else as it is."""
    return json.loads(value) if isinstance(value, str) else value


def sendable(headers: dict[str, SecretStr]) -> dict[str, SecretStr]:
    """Return the headers when HTTP can carry them."""
    for name, value in headers.items():
        if not (HEADER_NAME.fullmatch(name) and HEADER_VALUE.fullmatch(value.get_secret_value())):
            raise ValueError
    return headers


class RefusedError(ValueError):
    """A value that is refused for a reason that the operator can do something about."""


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


def redacted(url: str) -> str:
    """Return the URL, or what was meant to be one, with stars for its user and password, and for its query.

    Everything before the last @ goes, so that a password that was not percent-encoded goes as well. Where an @ follows
    a question mark, which is part of what cannot be told, and all goes.
    """
    place, mark, query = url.partition("?")
    if "@" in query:
        return re.sub(r"^(https?://)?.*", r"\1***", url, flags=re.DOTALL | re.IGNORECASE)
    shown = re.sub(r"^(https?://)?.*@", r"\1***@", place, flags=re.DOTALL | re.IGNORECASE)
    return f"{shown}?***" if mark else shown


Url = Annotated[str, AfterValidator(metrics_url)]
Size = Annotated[int, BeforeValidator(size_bytes), Field(ge=1, le=2**53)]
"""Up to what a float counts exactly."""

Gpus = Annotated[Literal["auto", "all"] | tuple[str, ...], BeforeValidator(gpu_names)]
Model = Annotated[InstanceOf[ModelFile], BeforeValidator(model_file), PlainSerializer(lambda model: str(model.path))]
Headers = Annotated[dict[str, SecretStr], BeforeValidator(json_mapping), AfterValidator(sendable)]
LogFormat = Annotated[Literal["logfmt", "json"], BeforeValidator(lower)]
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(lower)]
