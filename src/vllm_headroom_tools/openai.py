"""JSON answers of servers with OpenAI's interface and of vLLM."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, json


class Model(Struct, frozen=True, kw_only=True):
    """A model of the server; `most_tokens` is the longest request, None where it is unknown."""

    name: str
    most_tokens: int | None


def parse_object(text: str | bytes | bytearray) -> dict[str, Any]:
    """Parse a JSON object; return an empty one for anything else, NaN included, which Python's parser would accept."""
    try:
        answer = json.decode(text)
    except (ValueError, RecursionError):
        return {}
    return answer if isinstance(answer, dict) else {}


def parse_first_model(text: str | bytes | bytearray) -> Model | None:
    """Parse the first model in the answer to GET /v1/models; None where there is none."""
    data = parse_object(text).get("data")
    first = data[0] if isinstance(data, list) and data else None
    if not isinstance(first, dict) or not isinstance(first.get("id"), str):
        return None
    most = first.get("max_model_len")
    return Model(name=first["id"], most_tokens=most if isinstance(most, int) else None)


def parse_server_version(text: str) -> str | None:
    """Parse the answer to GET /version, {"version": "0.11.2"}; None for any other answer."""
    version = parse_object(text).get("version")
    return version if isinstance(version, str) else None


def find_error(answer: Mapping[str, Any]) -> str | None:
    """Return the error in an object, in full; None where there is none."""
    error = answer.get("error")
    if isinstance(error, dict):
        error = error.get("message", error)
    error = answer.get("message") if error is None else error
    return None if error is None else str(error)
