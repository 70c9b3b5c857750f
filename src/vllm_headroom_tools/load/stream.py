"""A streamed answer, parsed event by event, and the result of its request."""

import json
import re
from collections.abc import Callable
from enum import StrEnum
from http import HTTPStatus
from typing import Any, Final

from msgspec import Struct

from vllm_headroom.vocabulary import CONTROLS
from vllm_headroom_tools.openai import find_error, parse_object

OUT_OF_MEMORY: Final = re.compile(r"out of memory|OutOfMemory", re.IGNORECASE)
"""Matches errors that report a lack of memory:

- torch's "CUDA out of memory"
- HIP's message
- CUDA's own "out of memory"
- the name of torch's exception
"""

ENGINE_DEAD: Final = re.compile(
    r"EngineCore encountered an issue|EngineDead|Background loop (?:has errored|is stopped)"
)
"""Matches errors that vLLM's web server returns after its engine has died. They are EngineDeadError
(V1) and AsyncEngineDeadError (V0).
"""

BUSY_STATUSES: Final = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
LONGEST_TEXT: Final = 160
"""Our choice: the maximum number of characters of a server's text that are shown."""


class Outcome(StrEnum):
    """How a request ended.

    Every request has exactly one of these outcomes.
    """

    SUCCEEDED = "succeeded"
    OUT_OF_MEMORY = "out_of_memory"
    FAILED = "failed"
    REJECTED = "rejected"
    REFUSED = "refused"
    CLOSED = "closed"
    TIMED_OUT = "timed_out"
    UNFINISHED = "unfinished"
    NOT_SENT = "not_sent"


class Completion(Struct, frozen=True, kw_only=True):
    """The result of a request."""

    outcome: Outcome
    text: str = ""  # Why the request did not succeed, which may be empty.
    is_engine_dead: bool = False  # Whether the answer says that the engine died.
    # The server's own counts, or None if the server did not report them.
    prompt_tokens: int | None = None
    generation_tokens: int | None = None


def parse_refusal(status: int, body: bytes) -> Completion:
    """Return the result of a request whose response status was not 200."""
    text = body.decode(errors="replace")
    error = find_error(parse_object(text)) or text
    shown_text = f"{status}: {error}" if error else str(status)
    outcome = Outcome.REJECTED if status in BUSY_STATUSES else Outcome.FAILED
    return _build_failure(error, shown_text, outcome)


def shorten_text(text: str) -> str:
    """Return the beginning of a text as a single line without control characters."""
    line = " ".join(text.split()).translate(CONTROLS)
    if len(line) <= LONGEST_TEXT:
        return line
    return f"{line[:LONGEST_TEXT]}..."


def _build_failure(error: str, shown_text: str, outcome: Outcome) -> Completion:
    """Return the result for a server error.

    The outcome is OUT_OF_MEMORY if the error says that memory ran out. `shown_text` is the text
    shown to the operator.
    """
    if OUT_OF_MEMORY.search(error):
        outcome = Outcome.OUT_OF_MEMORY
    is_engine_dead = ENGINE_DEAD.search(error) is not None
    return Completion(outcome=outcome, text=shorten_text(shown_text), is_engine_dead=is_engine_dead)


DATA_PREFIX: Final = b"data:"
DONE: Final = b"[DONE]"
"""The last event of a stream."""

LONGEST_EVENT_BYTES: Final = 2**20
"""The maximum length of a line in a stream, in bytes. Without a maximum, a stream that has no line
breaks would fill this process's memory.
"""


class StreamError(Exception):
    """An answer is not an event stream in the format of OpenAI's servers.

    The message is intended for the operator.
    """


class Stream:
    """The part of an answer that has arrived so far.

    `add_gap` is called for every event with a choice. The argument of `add_gap` is the seconds
    since the previous event with a choice, or 0 if both arrived together. vLLM's own benchmark
    counts the same events (vllm/benchmarks/lib/endpoint_request_func.py).
    """

    # avoid a dictionary per object, because 10,000 streams may be open at once
    __slots__ = (
        "_add_gap",
        "_error",
        "_is_done",
        "_last_token_seconds",
        "_unfinished_line",
        "_usage",
        "first_token_seconds",
    )

    def __init__(self, add_gap: Callable[[float], None]) -> None:
        # when the first event with a choice arrived, or None before that
        self.first_token_seconds: float | None = None
        self._add_gap = add_gap
        self._last_token_seconds = 0.0
        self._unfinished_line = b""
        self._is_done = False
        self._error: str | None = None
        self._usage: dict[str, Any] = {}

    def feed(self, data: bytes, now_seconds: float) -> None:
        """Process bytes received at `now_seconds`; raise StreamError if they are not a stream.

        OpenAI's servers send one data line per event.
        """
        # The next bytes continue the text after the last line break.
        *lines, self._unfinished_line = (self._unfinished_line + data).split(b"\n")
        for line in lines:
            if not line.startswith(DATA_PREFIX):
                continue
            text = line.removeprefix(DATA_PREFIX).strip()
            if text == DONE:
                self._is_done = True
            else:
                self._add_event(_parse_event(text), now_seconds)
        if len(self._unfinished_line) > LONGEST_EVENT_BYTES:
            raise StreamError(f"a line of its stream is longer than {LONGEST_EVENT_BYTES} bytes")

    def build_completion(self) -> Completion:
        """Return the result of a complete answer.

        The request failed if its answer has an error or lacks the final [DONE].
        """
        # An error within the stream is sent with status 200.
        if self._error is not None:
            return _build_failure(self._error, self._error, Outcome.FAILED)
        if not self._is_done:
            text = "no [DONE] at the end"
            if self.first_token_seconds is None:
                text = "it answered 200 with no stream of events"
            return Completion(outcome=Outcome.FAILED, text=text)
        return Completion(
            outcome=Outcome.SUCCEEDED,
            prompt_tokens=self._read_count("prompt_tokens"),
            generation_tokens=self._read_count("completion_tokens"),
        )

    def _read_count(self, name: str) -> int | None:
        """Return a count from the server's usage data, or None if it was not sent."""
        count = self._usage.get(name)
        return count if isinstance(count, int) else None

    def _add_event(self, event: dict[str, Any], now_seconds: float) -> None:
        """Store an event's time, error and counts."""
        choices = event.get("choices")
        if choices:
            self._add_token_time(now_seconds)
            error = _find_abort(choices)
        else:
            error = find_error(event)
        self._error = self._error or error  # later errors are consequences of the first one
        usage = event.get("usage")
        if isinstance(usage, dict):
            self._usage = usage

    def _add_token_time(self, now_seconds: float) -> None:
        if self.first_token_seconds is None:
            self.first_token_seconds = now_seconds
        else:
            self._add_gap(now_seconds - self._last_token_seconds)
        self._last_token_seconds = now_seconds


def _parse_event(text: bytes) -> dict[str, Any]:
    """Return the JSON object in an event; raise StreamError if it is not one."""
    try:
        event = json.loads(text)
    except (ValueError, RecursionError):
        raise StreamError("an event of its stream is no JSON") from None
    if not isinstance(event, dict):
        raise StreamError("an event of its stream is no JSON object")
    return event


def _find_abort(choices: object) -> str | None:
    """Return an error text if the engine ended an answer early, otherwise None."""
    error = None
    for choice in choices if isinstance(choices, list) else ():
        reason = choice.get("finish_reason") if isinstance(choice, dict) else None
        if reason in ("abort", "error"):
            error = f"the engine ended it with finish_reason {reason}"
    return error
