"""A streamed answer, parsed event by event, and the tally of requests."""

import json
import re
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from http import HTTPStatus
from typing import Any, Final

from msgspec import Struct

from vllm_headroom.vocabulary import CONTROLS
from vllm_headroom_tools.history import Histogram
from vllm_headroom_tools.openai import find_error, parse_object

OUT_OF_MEMORY: Final = re.compile(r"out of memory|OutOfMemory", re.IGNORECASE)
"""torch's "CUDA out of memory" and the name of its exception, HIP's, and CUDA's own "out of memory"."""

ENGINE_DEAD: Final = re.compile(
    r"EngineCore encountered an issue|EngineDead|Background loop (?:has errored|is stopped)"
)
"""What vLLM's web server answers when its engine is dead: V1's EngineDeadError, V0's AsyncEngineDeadError."""

BUSY: Final = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
LONGEST_TEXT: Final = 160
"""Characters of the server's words that are shown."""


class Outcome(StrEnum):
    """What became of a request; a closed set, each request is counted in one."""

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
    """A request's outcome, and `text` that explains it; tokens are the server's counts, None where it gave none."""

    outcome: Outcome
    text: str = ""
    engine_dead: bool = False
    prompt_tokens: int | None = None
    generation_tokens: int | None = None


def parse_refusal(status: int, body: bytes) -> Completion:
    """Return what a status other than 200 means."""
    text = body.decode(errors="replace")
    said = find_error(parse_object(text)) or text
    otherwise = Outcome.REJECTED if status in BUSY else Outcome.FAILED
    return _build_failure(said, f"{status}: {said}" if said else str(status), otherwise)


def shorten_text(text: str) -> str:
    """Return the beginning of a text, fit for a line of a terminal."""
    line = " ".join(text.split()).translate(CONTROLS)
    return line if len(line) <= LONGEST_TEXT else f"{line[:LONGEST_TEXT]}..."


def _build_failure(said: str, text: str, otherwise: Outcome) -> Completion:
    outcome = Outcome.OUT_OF_MEMORY if OUT_OF_MEMORY.search(said) else otherwise
    return Completion(
        outcome=outcome, text=shorten_text(text), engine_dead=ENGINE_DEAD.search(said) is not None
    )


DONE: Final = b"[DONE]"
LONGEST_LINE: Final = 2**20
"""Bytes; a stream without line ends need not be held in memory."""


class StreamError(Exception):
    """What is no stream of events as OpenAI's servers send them; the message is for the operator."""


class Stream:
    """What has arrived of one answer; `gap` receives the seconds from each event with a choice to the next.

    `first_seconds` is when the first such event came, None before it. vLLM's own benchmark counts the same events
    (vllm/benchmarks/lib/endpoint_request_func.py). Those that come in one piece have no time between them.
    """

    __slots__ = ("_done", "_error", "_gap", "_last_seconds", "_rest", "_usage", "first_seconds")

    def __init__(self, gap: Callable[[float], None]) -> None:
        self.first_seconds: float | None = None
        self._gap = gap
        self._last_seconds = 0.0
        self._rest = b""
        self._done = False
        self._error: str | None = None
        self._usage: dict[str, Any] = {}

    def feed(self, data: bytes, now: float) -> None:
        """Take what came at `now`: OpenAI's servers send one line of data for each event; raises StreamError."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            if (event := line[5:].strip()) == DONE:
                self._done = True
                continue
            try:
                said = json.loads(event)
            except (ValueError, RecursionError):
                raise StreamError("an event of its stream is no JSON") from None
            if not isinstance(said, dict):
                raise StreamError("an event of its stream is no JSON object")
            self._take(said, now)
        if len(self._rest) > LONGEST_LINE:
            raise StreamError(f"a line of its stream is longer than {LONGEST_LINE} bytes")

    def answer(self) -> Completion:
        """Return the result, now that it is over."""
        if self._error is not None:
            return _build_failure(self._error, self._error, Outcome.FAILED)
        if not self._done:
            text = (
                "it answered 200 with no stream of events"
                if self.first_seconds is None
                else "no [DONE] at the end"
            )
            return Completion(outcome=Outcome.FAILED, text=text)
        counts = (self._usage.get(name) for name in ("prompt_tokens", "completion_tokens"))
        prompt, generated = (count if isinstance(count, int) else None for count in counts)
        return Completion(
            outcome=Outcome.SUCCEEDED, prompt_tokens=prompt, generation_tokens=generated
        )

    def _take(self, said: dict[str, Any], now: float) -> None:
        choices, error = said.get("choices"), None
        if choices:
            if self.first_seconds is None:
                self.first_seconds = now
            else:
                self._gap(now - self._last_seconds)
            self._last_seconds = now
            for choice in choices if isinstance(choices, list) else ():
                finish = choice.get("finish_reason") if isinstance(choice, dict) else None
                if finish in ("abort", "error"):
                    error = f"the engine ended it with finish_reason {finish}"
        else:
            error = find_error(said)
        self._error = self._error or error
        if isinstance(usage := said.get("usage"), dict):
            self._usage = usage


MOST_TEXTS: Final = 20
"""Different words of the server that are kept for each step; a broken server can say something new each time."""

OTHERS: Final = "(other texts)"


class Tally:
    """Counts; times are in seconds, and of requests that succeeded, but for `between`: gaps are of all streams.

    `served_seconds` is from the begin of the step to the end of the last request that succeeded, 0 before one has.
    `uncounted` are the answers for which the server gave no counts of tokens, `delays` how late this process was.
    """

    def __init__(self, began_seconds: float) -> None:
        self.began_seconds = began_seconds
        self.served_seconds = 0.0
        self.began = 0
        self.outcomes: Counter[Outcome] = Counter()
        self.texts: Counter[tuple[Outcome, str]] = Counter()
        self.engine_dead = False
        self.streams = 0
        self.most_streams = 0
        self.to_first = Histogram()
        self.between = Histogram()
        self.per_token = Histogram()
        self.to_end = Histogram()
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.uncounted = 0
        self.delays = Histogram()

    @property
    def open(self) -> int:
        """Requests that have begun and not ended."""
        return self.began - self.outcomes.total()

    def succeed(self, answer: Completion, *, began: float, first: float, ended: float) -> None:
        """Take when a request that succeeded began, had its first token and ended, and the server's counts."""
        self.served_seconds = ended - self.began_seconds
        self.to_first.add(first - began)
        self.to_end.add(ended - began)
        if (tokens := answer.generation_tokens or 0) > 1:
            self.per_token.add((ended - first) / (tokens - 1))
        self.prompt_tokens += answer.prompt_tokens or 0
        self.generation_tokens += answer.generation_tokens or 0
        self.uncounted += answer.prompt_tokens is None or answer.generation_tokens is None

    def end(self, answer: Completion) -> None:
        """Count how a request ended."""
        self.outcomes[answer.outcome] += 1
        self.engine_dead = self.engine_dead or answer.engine_dead
        if answer.text:
            known = (answer.outcome, answer.text) in self.texts or len(self.texts) < MOST_TEXTS
            self.texts[answer.outcome, answer.text if known else OTHERS] += 1
