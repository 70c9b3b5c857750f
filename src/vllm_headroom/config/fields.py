"""How a setting is declared: its type, what is said of it, and how its value is read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from msgspec import Struct
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    InstanceOf,
    PlainSerializer,
    SecretStr,
    ValidationError,
)
from pydantic.fields import FieldInfo

from vllm_headroom.config import kinds
from vllm_headroom.config.kinds import SHOWN, Value, choice, gpu_names, metrics_url, shown
from vllm_headroom.config.plain import AUTO
from vllm_headroom.parse.profiles import PROFILES
from vllm_headroom.sizing.model_config import read_model
from vllm_headroom.sizing.shape import ModelShape
from vllm_headroom.units import MOST_BYTES, RefusedError, size_bytes

HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
HEADER_VALUE: Final = re.compile(r"[\x21-\x7e](?:[\t\x20-\x7e]*[\x21-\x7e])?")
"""RFC 9110, 5.1 and 5.5, without the bytes beyond ASCII whose meaning is not defined."""


def from_text(read: Callable[[str], object]) -> BeforeValidator:
    """Return what reads a text, and leaves everything else to the type."""
    return BeforeValidator(lambda value: read(value) if isinstance(value, str) else value)


def sendable(headers: dict[str, SecretStr]) -> dict[str, SecretStr]:
    """Return the headers when HTTP can carry them."""
    for name, value in headers.items():
        if not (HEADER_NAME.fullmatch(name) and HEADER_VALUE.fullmatch(value.get_secret_value())):
            raise ValueError
    return headers


class ModelFile(Struct, frozen=True, kw_only=True):
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


PROFILE: Final = choice((AUTO, *(each.name for each in PROFILES)))
Url = Annotated[str, AfterValidator(metrics_url)]
EngineProfile = Annotated[str, from_text(str.lower), AfterValidator(PROFILE.read)]
Size = Annotated[int, from_text(size_bytes), Field(ge=1, le=MOST_BYTES)]
Gpus = Annotated[Literal["auto", "all"] | tuple[str, ...], BeforeValidator(gpu_names)]
Model = Annotated[InstanceOf[ModelFile], BeforeValidator(model_file), PlainSerializer(lambda model: str(model.path))]
Headers = Annotated[dict[str, SecretStr], from_text(json.loads), AfterValidator(sendable)]
LogFormat = Annotated[Literal["logfmt", "json"], from_text(str.lower)]
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], from_text(str.lower)]


def setting(default: object, description: str, *, accepts: str, word: str, shown: str = "", **rules: Any) -> Any:  # noqa: ANN401 - as pydantic's Field
    """Declare a setting; `word` stands for its value in --help, `shown` for its default where that is no plain text."""
    about = {"accepts": accepts, "word": word, "shown": shown or ("none" if default is None else str(default))}
    return Field(default, description=description, json_schema_extra={**about}, **rules)


def seconds(default: float | None, low: float, high: float, description: str, *, shown: str = "") -> Any:  # noqa: ANN401 - as pydantic's Field
    """Declare a duration of `low` to `high` seconds."""
    accepts = f"a number of seconds from {low:g} to {high:g}"
    return setting(default, description, accepts=accepts, word="SECONDS", shown=shown, ge=low, le=high)


def size(default: str | None, description: str, *, example: str = "", shown: str = "") -> Any:  # noqa: ANN401 - as pydantic's Field
    """Declare a size; `example` is one that is accepted, where there is no default to show."""
    accepts, n_bytes = kinds.size(default or example).accepts, None if default is None else size_bytes(default)
    return setting(n_bytes, description, accepts=accepts, word="SIZE", shown=default or shown)


def file(description: str) -> Any:  # noqa: ANN401 - as pydantic's Field
    """Declare the path of a file, which there is none of by default."""
    return setting(None, description, accepts=kinds.FILE.accepts, word="FILE")


def about(field: FieldInfo, what: Literal["accepts", "word", "shown"]) -> str:
    """Return what `setting` was told of a field."""
    extra = field.json_schema_extra
    return str(extra[what]) if isinstance(extra, dict) else ""


def setting_value(kind: type[BaseModel], name: str) -> Value[object]:
    """Return how a setting's value is read: what `kind` accepts is left as it was given, for `kind` to read."""

    def read(given: object) -> object:
        try:
            kind.model_validate({name: given})
        except ValidationError as error:
            reasons = [mistake.get("ctx", {}).get("error") for mistake in error.errors(include_input=False)]
            told = [str(reason) for reason in reasons if isinstance(reason, RefusedError)]
            raise RefusedError(*told[:1]) if told else ValueError from None
        return given

    return Value(read=read, accepts=about(kind.model_fields[name], "accepts"), shown=SHOWN.get(name, shown))
