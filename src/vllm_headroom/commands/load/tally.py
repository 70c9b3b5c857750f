"""What the requests that began in one step came to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from vllm_headroom.commands.load.stream import Completion, Outcome
from vllm_headroom.trace.counter import Histogram

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

    def begin(self) -> None:
        """Count a request."""
        self.began += 1

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Count a stream, a request with its connection, while the block runs."""
        self.streams += 1
        self.most_streams = max(self.most_streams, self.streams)
        try:
            yield
        finally:
            self.streams -= 1

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
