"""How log lines are written: to stderr, as logfmt or JSON, our own and those of libraries alike."""

from __future__ import annotations

import logging
import sys
import textwrap
from typing import Final

import structlog
from structlog.stdlib import ProcessorFormatter
from structlog.typing import EventDict, Processor, WrappedLogger

from vllm_headroom.vocabulary import CONTROLS

OURS: Final = "vllm_headroom"
FIRST: Final = ("ts", "level", "event")
SHARED: Final[tuple[Processor, ...]] = (
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
    structlog.processors.format_exc_info,
)


def configure(log_format: str, log_level: str) -> None:
    """Write the lines of `log_level` and above to stderr; of libraries, warnings and above at any level.

    In logfmt a traceback follows its line as an indented block, in JSON it is the field `exception`.
    """
    level = logging.getLevelNamesMapping()[log_level.upper()]
    handler = logging.StreamHandler(sys.stderr)
    renderer = structlog.processors.JSONRenderer() if log_format == "json" else _logfmt
    handler.setFormatter(
        ProcessorFormatter(
            foreign_pre_chain=SHARED, processors=(ProcessorFormatter.remove_processors_meta, _ordered, renderer)
        )
    )
    logging.basicConfig(handlers=[handler], level=max(level, logging.WARNING), force=True)
    logging.getLogger(OURS).setLevel(level)
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *SHARED, ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
    )


def _ordered(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    return {key: event[key] for key in FIRST} | dict(event)


def _logfmt(logger: WrappedLogger, method: str, event: EventDict) -> str:
    traceback = event.pop("exception", None)
    line = structlog.processors.LogfmtRenderer(bool_as_flag=False)(logger, method, event).translate(CONTROLS)
    return line if traceback is None else f"{line}\n{textwrap.indent(traceback, '  ')}"
