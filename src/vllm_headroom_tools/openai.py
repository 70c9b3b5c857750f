"""What servers with OpenAI's interface, and vLLM, say in JSON: their models, their version, what went wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, json


class Model(Struct, frozen=True, kw_only=True):
    """A model that the server offers; `most_tokens` is None where it does not say how long a request may be."""

    name: str
    most_tokens: int | None


def json_object(text: str | bytes) -> dict[str, Any]:
    """Return the object that a text is, an empty one for what is none: JSON knows no NaN, which Python would read."""
    try:
        said = json.decode(text)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def first_model(text: str | bytes) -> Model | None:
    """Return the first model in the answer to GET /v1/models; None where there is none."""
    data = json_object(text).get("data")
    first = data[0] if isinstance(data, list) and data else None
    if not isinstance(first, dict) or not isinstance(first.get("id"), str):
        return None
    most = first.get("max_model_len")
    return Model(name=first["id"], most_tokens=most if isinstance(most, int) else None)


def server_version(text: str) -> str | None:
    """Return the version in the answer to GET /version, {"version": "0.11.2"}; None where it is another one."""
    version = json_object(text).get("version")
    return version if isinstance(version, str) else None


def error_of(said: Mapping[str, Any]) -> str | None:
    """Return the error that an object tells of, whole; None where it tells of none."""
    error = said.get("error")
    if isinstance(error, dict):
        error = error.get("message", error)
    told = said.get("message") if error is None else error
    return None if told is None else str(told)
