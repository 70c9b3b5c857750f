"""Count the requests of a step."""

from collections import Counter
from typing import Final

from vllm_headroom_tools.history import Histogram
from vllm_headroom_tools.load.stream import Completion, Outcome

MOST_TEXTS: Final = 20
"""Different words of the server that are kept for each step; a broken server can say something new
each time."""

OTHER_TEXTS: Final = "(other texts)"
"""Replaces all words beyond these."""


QUANTILES: Final = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
"""The quantiles of a time that the report has, by their names."""


class Tally:
    """Counts the requests of a step, and collects their times in seconds.

    Times are of requests that succeeded, but for those between two tokens, which are of all.
    """

    def __init__(self, start_seconds: float) -> None:
        self.start_seconds = start_seconds
        # from the start to the end of the last request that succeeded, 0 before one has
        self.served_seconds = 0.0
        self.started_requests = 0
        self.outcomes: Counter[Outcome] = Counter()
        self.texts: Counter[tuple[Outcome, str]] = Counter()
        self.is_engine_dead = False
        self.open_streams = 0
        self.most_streams = 0
        self.first_token_seconds = Histogram()
        self.inter_token_seconds = Histogram()
        self.per_token_seconds = Histogram()
        self.end_to_end_seconds = Histogram()
        self.prompt_tokens = 0
        self.generation_tokens = 0
        # answers for which the server gave no counts of tokens
        self.uncounted_answers = 0
        # how late this process was
        self.own_delay_seconds = Histogram()

    @property
    def open_requests(self) -> int:
        """Requests that have begun and not ended."""
        return self.started_requests - self.outcomes.total()

    def open_stream(self) -> None:
        """Count a stream that is open."""
        self.open_streams += 1
        self.most_streams = max(self.most_streams, self.open_streams)

    def close_stream(self) -> None:
        """Count a stream that is no longer open."""
        self.open_streams -= 1

    def add_success(
        self,
        completion: Completion,
        *,
        start_seconds: float,
        first_token_seconds: float,
        end_seconds: float,
    ) -> None:
        """Take the times of a request that succeeded, and the server's counts."""
        self.served_seconds = end_seconds - self.start_seconds
        self.first_token_seconds.add(first_token_seconds - start_seconds)
        self.end_to_end_seconds.add(end_seconds - start_seconds)
        tokens = completion.generation_tokens or 0
        if tokens > 1:
            self.per_token_seconds.add((end_seconds - first_token_seconds) / (tokens - 1))
        self.prompt_tokens += completion.prompt_tokens or 0
        self.generation_tokens += completion.generation_tokens or 0
        if completion.prompt_tokens is None or completion.generation_tokens is None:
            self.uncounted_answers += 1

    def add_end(self, completion: Completion) -> None:
        """Count how a request ended."""
        self.outcomes[completion.outcome] += 1
        self.is_engine_dead = self.is_engine_dead or completion.is_engine_dead
        if not completion.text:
            return
        text = completion.text
        if len(self.texts) >= MOST_TEXTS and (completion.outcome, text) not in self.texts:
            text = OTHER_TEXTS
        self.texts[completion.outcome, text] += 1
