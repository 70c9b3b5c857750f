"""How a setting is declared: how its value is read, and what is said of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from pydantic import Field, SecretStr
from pydantic.fields import FieldInfo

from vllm_headroom.config import kinds
from vllm_headroom.config.kinds import FILE, Value, bounded, choice, in_any_case, metrics_url, shown_url, whole
from vllm_headroom.config.plain import AUTO
from vllm_headroom.parse.profiles import PROFILES
from vllm_headroom.units import RefusedError, size_bytes
from vllm_headroom_tools.sizing.footprint import ModelShape
from vllm_headroom_tools.sizing.model_config import read_model

HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
HEADER_VALUE: Final = re.compile(r"[\x21-\x7e](?:[\t\x20-\x7e]*[\x21-\x7e])?")
"""RFC 9110, 5.1 and 5.5, without the bytes beyond ASCII whose meaning is not defined."""


class Setting(Struct, frozen=True):
    """What is said of a setting: how its value is read, the word for it in --help, and how its default is shown."""

    kind: Value[Any]
    word: str
    default: str

    def __call__(self, schema: dict[str, Any]) -> None:
        """Leave the schema as it is: pydantic keeps for us what would change one."""


class ModelFile(Struct, frozen=True, kw_only=True):
    """A model's configuration: where it is, and what it says."""

    path: Path
    shape: ModelShape


def _headers(given: object) -> dict[str, SecretStr]:
    """Return the headers, in JSON or as YAML has them, when HTTP can carry them."""
    headers = json.loads(given) if isinstance(given, str) else given
    if not isinstance(headers, dict) or not all(isinstance(value, str) for value in headers.values()):
        raise ValueError
    if not all(HEADER_NAME.fullmatch(str(name)) and HEADER_VALUE.fullmatch(value) for name, value in headers.items()):
        raise ValueError
    return {name: SecretStr(value) for name, value in headers.items()}


def _model(text: str) -> ModelFile:
    path = FILE.read(text)
    shape = read_model(path)
    if isinstance(shape, str):
        raise RefusedError(shape)
    return ModelFile(path=path, shape=shape)


def matching(pattern: str, accepts: str) -> Value[str]:
    """Return the kind of a text that the pattern describes."""

    def read(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise ValueError
        return text

    return Value(read=read, accepts=accepts)


_PROFILES: Final = (AUTO, *(each.name for each in PROFILES))
PROFILE: Final = Value(read=in_any_case(choice(_PROFILES)).read, accepts=", ".join(_PROFILES))
URL: Final = Value(read=metrics_url, accepts="an http or https URL", shown=shown_url)
HEADERS: Final = Value(
    read=_headers,
    accepts="a mapping of header names to values, in JSON or YAML",
    shown=lambda _: "a value that is kept secret",
    only_text=False,
)
MODEL: Final = Value(read=_model, accepts="the path of a model's config.json, or of the folder that has one")
HOST: Final = matching(
    r"[0-9A-Za-z.:_%-]*", "an address or name of this machine, or nothing for all interfaces, IPv4 and IPv6"
)
PORT: Final = Value(read=whole(0, 65535).read, accepts="a port number from 0 to 65535")


def setting(kind: Value[Any], default: object, word: str, description: str, *, shown: str = "", **more: Any) -> Any:  # noqa: ANN401 - as pydantic's Field
    """Declare a setting; `word` stands for its value in --help, `shown` for its default where that is no plain text."""
    about = Setting(kind, word, shown or ("none" if default is None else str(default)))
    return Field(default, description=description, json_schema_extra=about, **more)


def seconds(default: float | None, low: float, high: float, description: str, *, shown: str = "") -> Any:  # noqa: ANN401 - as pydantic's Field
    """Declare a duration of `low` to `high` seconds."""
    kind = Value(read=bounded(float, low, high), accepts=f"a number of seconds from {low:g} to {high:g}")
    return setting(kind, default, "SECONDS", description, shown=shown)


def size(default: str | None, description: str, *, example: str = "", shown: str = "") -> Any:  # noqa: ANN401 - as pydantic's Field
    """Declare a size; `example` is one that is accepted, where there is no default to show."""
    n_bytes = None if default is None else size_bytes(default)
    return setting(kinds.size(default or example), n_bytes, "SIZE", description, shown=default or shown)


def file(description: str) -> Any:  # noqa: ANN401 - as pydantic's Field
    """Declare the path of a file, which there is none of by default."""
    return setting(FILE, None, "FILE", description)


def about(field: FieldInfo) -> Setting:
    """Return what `setting` was told of a field."""
    assert isinstance(field.json_schema_extra, Setting)  # noqa: S101 - each is declared so
    return field.json_schema_extra
