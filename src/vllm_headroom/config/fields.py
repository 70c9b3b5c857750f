"""How a setting is declared, and how its value is read."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo

from vllm_headroom.config.kinds import SHOWN, Value, shown
from vllm_headroom.units import RefusedError

NONE: Final = "none"


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
