"""Additions to the engine's log since it was last read."""

from typing import Protocol

from msgspec import Struct

from vllm_headroom.model import Failure


class LogBatch(Struct, frozen=True, kw_only=True):
    """Bytes of the log, in the order in which they were written."""

    content: bytes
    is_old: bool = False
    """Whether the bytes were written before the sidecar began to follow the log. If they were, the
    time of writing is unknown.
    """

    is_broken: bool = False
    """Whether earlier bytes are missing. If so, an incomplete line must not be joined with these
    bytes.
    """


class LogSource(Protocol):
    """A place from which the engine's log can be read."""

    async def fetch(self, timeout_seconds: float) -> LogBatch | Failure:
        """Return the additions, or a Failure, within a time limit; never raise."""
