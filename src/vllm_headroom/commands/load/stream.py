"""A streamed answer, followed event by event."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

from vllm_headroom.commands.load.answer import BROKEN_FINISHES, Answer, Outcome, broken
from vllm_headroom.parse.openai import error_of

DONE: Final = b"[DONE]"
LONGEST_LINE: Final = 2**20
"""Bytes; a stream without line ends need not be held in memory."""


class NotUnderstood(Exception):  # noqa: N818 - it says what came
    """What is no stream of events as OpenAI's servers send them; the message is for the operator."""


class Stream:
    """What has come so far of one answer; `gap` is told the seconds from each event with a choice to the next.

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
        """Take what came at `now`; raises NotUnderstood."""
        for event in self._events(data):
            if event == DONE:
                self._done = True
                continue
            try:
                said = json.loads(event)
            except (ValueError, RecursionError):
                raise NotUnderstood("an event of its stream is no JSON") from None
            if not isinstance(said, dict):
                raise NotUnderstood("an event of its stream is no JSON object")
            self._take(said, now)

    def answer(self) -> Answer:
        """Return what it came to, now that it is over."""
        if self._error is not None:
            return broken(self._error)
        if not self._done:
            text = "it answered 200 with no stream of events" if self.first_seconds is None else "no [DONE] at the end"
            return Answer(outcome=Outcome.FAILED, text=text)
        prompt, generated = (self._usage.get(name) for name in ("prompt_tokens", "completion_tokens"))
        return Answer(
            outcome=Outcome.SUCCEEDED,
            prompt_tokens=prompt if isinstance(prompt, int) else None,
            generation_tokens=generated if isinstance(generated, int) else None,
        )

    def _events(self, data: bytes) -> Iterator[bytes]:
        """Yield the data of each event that is complete; OpenAI's servers send one line of data for each."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
        if len(self._rest) > LONGEST_LINE:
            raise NotUnderstood(f"a line of its stream is longer than {LONGEST_LINE} bytes")

    def _take(self, said: dict[str, Any], now: float) -> None:
        choices = said.get("choices")
        if choices:
            if self.first_seconds is None:
                self.first_seconds = now
            else:
                self._gap(now - self._last_seconds)
            self._last_seconds = now
            self._error = self._error or _broke(choices)
        else:
            self._error = self._error or error_of(said)
        if isinstance(usage := said.get("usage"), dict):
            self._usage = usage


def _broke(choices: object) -> str | None:
    """Return that the server gave up a choice; None where it did not."""
    for choice in choices if isinstance(choices, list) else ():
        finish = choice.get("finish_reason") if isinstance(choice, dict) else None
        if finish in BROKEN_FINISHES:
            return f"the engine ended it with finish_reason {finish}"
    return None
