"""The log: events with fields, written through the standard library's logging."""

import logging
from collections.abc import MutableMapping
from contextvars import ContextVar
from typing import Any, Final

ENGINE_NAME: Final = ContextVar[str]("engine_name", default="")
"""The engine of this task's log lines. Empty if the daemon watches only one engine."""


class Log(logging.LoggerAdapter[logging.Logger]):
    """Takes the fields of an event as keyword arguments.

    For example, `log.info("source answers", source="engine")` logs an event with one field.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name))

    def process(
        self, msg: str, kwargs: MutableMapping[str, Any]
    ) -> tuple[str, MutableMapping[str, Any]]:
        """Move the fields of an event to the attribute `fields` of its log record."""
        error = kwargs.pop("exc_info", None)
        engine_name = ENGINE_NAME.get()
        if engine_name:
            kwargs["of_engine"] = engine_name
        return msg, {"exc_info": error, "extra": {"fields": kwargs, "engine_name": engine_name}}
