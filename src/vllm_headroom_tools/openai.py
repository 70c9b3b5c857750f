"""JSON responses of vLLM and other servers with an OpenAI-compatible API."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, json


class ListedModel(Struct, frozen=True, kw_only=True):
    """A model that the server lists."""

    name: str

    max_tokens: int | None
    """The maximum context length of a request in tokens. The value is None if the server does not
    report it.
    """


def parse_object(text: str | bytes | bytearray) -> dict[str, Any]:
    """Parse a JSON object.

    Returns an empty object for any other text. NaN is rejected as invalid JSON, even though
    Python's parser would accept it.
    """
    try:
        answer = json.decode(text)
    except (ValueError, RecursionError):
        return {}
    return answer if isinstance(answer, dict) else {}


def parse_first_model(text: str | bytes | bytearray) -> ListedModel | None:
    """Parse the first model in the response to GET /v1/models.

    Returns None if the response lists no models. Also returns None if the first model has no name.
    """
    models = parse_object(text).get("data")
    if not isinstance(models, list) or not models:
        return None
    model = models[0]
    if not isinstance(model, dict):
        return None
    name = model.get("id")
    if not isinstance(name, str):
        return None
    max_tokens = model.get("max_model_len")
    if not isinstance(max_tokens, int):
        max_tokens = None
    return ListedModel(name=name, max_tokens=max_tokens)


def parse_server_version(text: str) -> str | None:
    """Return the version in a /version response such as {"version": "0.11.2"}, or None."""
    version = parse_object(text).get("version")
    return version if isinstance(version, str) else None


def find_error(answer: Mapping[str, Any]) -> str | None:
    """Return the full error message in a JSON object.

    Returns None if the object does not contain an error.
    """
    error = answer.get("error")
    # OpenAI's servers return {"error": {"message": ...}}, older vLLM servers {"message": ...}.
    if isinstance(error, dict):
        error = error.get("message", error)
    if error is None:
        error = answer.get("message")
    return None if error is None else str(error)
