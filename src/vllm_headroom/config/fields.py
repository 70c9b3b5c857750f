"""How a setting is declared, and what a refusal says of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal

from pydantic import BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo

from vllm_headroom.config.sources import CONFIG, Given
from vllm_headroom.config.values import RefusedError, redacted

NONE: Final = "none"

LONGEST_SHOWN: Final = 80
"""Characters of a refused value that a line shows."""


def setting(default: object, description: str, *, accepts: str, word: str, shown: str = "", **rules: Any) -> Any:  # noqa: ANN401 - as pydantic's Field
    """Declare a setting; `word` stands for its value in --help, `shown` for its default where that is no plain text."""
    about = {"accepts": accepts, "word": word, "shown": shown or str(default)}
    return Field(default, description=description, json_schema_extra={**about}, **rules)


def seconds(default: float, low: float, high: float, description: str) -> Any:  # noqa: ANN401 - as pydantic's Field
    """Declare a duration of `low` to `high` seconds."""
    accepts = f"a number of seconds from {low:g} to {high:g}"
    return setting(default, description, accepts=accepts, word="SECONDS", ge=low, le=high)


def about(field: FieldInfo, what: Literal["accepts", "word", "shown"]) -> str:
    """Return what `setting` was told of a field."""
    extra = field.json_schema_extra
    return str(extra[what]) if isinstance(extra, dict) else ""


def refusals(kind: type[BaseModel], given: Iterable[Given]) -> list[str]:
    """Return a line for each value that `kind` refuses: what was given, secrets aside, and what is accepted."""
    return [
        f"{one.name}: got {_shown(one)}{reason}, accepts {about(kind.model_fields[one.setting], 'accepts')}"
        for one in given
        if one.setting != CONFIG and (reason := _refusal(kind, one)) is not None
    ]


def _refusal(kind: type[BaseModel], given: Given) -> str | None:
    """Return why a value is refused, in brackets and empty where the value says it all; None where it is not."""
    if given.value is None:
        return ""
    try:
        kind.model_validate({given.setting: given.value})
    except ValidationError as error:
        reasons = [mistake.get("ctx", {}).get("error") for mistake in error.errors(include_input=False)]
        return "".join(f" ({reason})" for reason in reasons if isinstance(reason, RefusedError))
    return None


def _shown(given: Given) -> str:
    if given.value is None:
        return "nothing"
    if given.setting == "engine_headers":
        return "a value that is kept secret"
    if given.setting != "engine_url":
        text = repr(given.value)
    elif isinstance(given.value, str):
        text = repr(redacted(given.value))
    else:
        return "no text"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."
