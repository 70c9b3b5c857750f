"""Count the requests of a step."""

from collections import Counter
from typing import Final

from vllm_headroom_tools.history import Histogram
from vllm_headroom_tools.load.stream import Completion, Outcome

MOST_TEXTS: Final = 20
"""Our choice: the maximum number of different server texts counted in each step. A broken server
may send a new text every time.
"""

OTHER_TEXTS: Final = "(other texts)"
"""Replaces any additional texts."""


QUANTILES: Final = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
"""The quantiles that are reported for each kind of time, by name."""


class Tally:
    """Counts the requests of a step and collects their times in seconds.

    The times between tokens come from all requests. All other times come only from successful
    requests.
    """

    def __init__(self, start_seconds: float) -> None:
        self.start_seconds = start_seconds
        # from the step's start until its last successful request ended, 0 without one
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
        # the number of answers for which the server reported no token counts
        self.uncounted_answers = 0
        # The measured delays of this process's own loop.
        self.own_delay_seconds = Histogram()

    @property
    def open_requests(self) -> int:
        """Return how many requests have begun but not ended."""
        return self.started_requests - self.outcomes.total()

    def open_stream(self) -> None:
        """Count a stream that begins.

        The highest number of open streams is updated.
        """
        self.open_streams += 1
        self.most_streams = max(self.most_streams, self.open_streams)

    def close_stream(self) -> None:
        """Count a stream that has ended."""
        self.open_streams -= 1

    def add_success(
        self,
        completion: Completion,
        *,
        start_seconds: float,
        first_token_seconds: float,
        end_seconds: float,
    ) -> None:
        """Add the times of a successful request and the server's token counts for it."""
        self.served_seconds = end_seconds - self.start_seconds
        self.first_token_seconds.add(first_token_seconds - start_seconds)
        self.end_to_end_seconds.add(end_seconds - start_seconds)
        tokens = completion.generation_tokens or 0
        # The time to the first token is recorded separately. The time per token only covers the
        # later tokens.
        if tokens > 1:
            self.per_token_seconds.add((end_seconds - first_token_seconds) / (tokens - 1))
        self.prompt_tokens += completion.prompt_tokens or 0
        self.generation_tokens += completion.generation_tokens or 0
        if completion.prompt_tokens is None or completion.generation_tokens is None:
            self.uncounted_answers += 1

    def add_end(self, completion: Completion) -> None:
        """Count a request that has ended, by outcome and text."""
        self.outcomes[completion.outcome] += 1
        self.is_engine_dead = self.is_engine_dead or completion.is_engine_dead
        if not completion.text:
            return
        text = completion.text
        if len(self.texts) >= MOST_TEXTS and (completion.outcome, text) not in self.texts:
            text = OTHER_TEXTS
        self.texts[completion.outcome, text] += 1
