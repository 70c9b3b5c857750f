"""The log: an event and its fields, through the standard library's logging."""

import logging
from collections.abc import MutableMapping
from typing import Any


class Log(logging.LoggerAdapter[logging.Logger]):
    """Takes the fields of an event as keyword arguments.

    `log.info("source answers", source="engine")` logs an event with one field.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name))

    def process(
        self, msg: str, kwargs: MutableMapping[str, Any]
    ) -> tuple[str, MutableMapping[str, Any]]:
        """Move the fields of an event to the attribute `fields` of its record."""
        error = kwargs.pop("exc_info", None)
        return msg, {"exc_info": error, "extra": {"fields": kwargs}}
