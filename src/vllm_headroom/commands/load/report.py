"""What a load came to, and whether that is good."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from vllm_headroom import catalog
from vllm_headroom.commands.load.answer import Outcome
from vllm_headroom.commands.load.observed import Observed, Span
from vllm_headroom.commands.load.run import Step
from vllm_headroom.commands.verdict import Verdict
from vllm_headroom.vocabulary import LeakState

TOLERATED_RATIO: Final = 0.01
"""Of the requests that may fail: one connection that breaks among hundreds says nothing of the server."""


class Kind(StrEnum):
    """Whose memory a series is."""

    GPU = "gpu"
    HOST = "host"


class LeakVerdict(StrEnum):
    """What the detector says of the whole run."""

    LEAKING = "leaking"
    GROWING = "growing"
    NO_LEAK = "no_leak"
    CANNOT_TELL = "cannot_tell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The verdict on one series, why it is that, and what the detector says it grew by per request; None if nothing."""

    verdict: LeakVerdict
    state: LeakState
    reason: str
    bytes_per_request: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """One series over the whole run; `name` is a GPU's index or a role, `uuid` is empty for a role."""

    kind: Kind
    name: str
    uuid: str
    span: Span
    growth: Growth
    finished: float | None

    @property
    def delta_bytes(self) -> float:
        """The change from before the load to after it."""
        return self.span.last - self.span.first

    @property
    def bytes_per_thousand_requests(self) -> float | None:
        """The change over the requests the engine finished; None where it finished none or does not say."""
        return 1000 * self.delta_bytes / self.finished if self.finished else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything there is to tell; `ended` is how the engine ended meanwhile, `unread` what could not be read."""

    target: str
    model: str
    asked: str
    steps: tuple[Step, ...]
    memory: tuple[Memory, ...]
    whole: Observed
    ended: str | None
    unread: tuple[str, ...]
    trace: str
    samples: int
    stopped: bool

    @property
    def outcomes(self) -> Counter[Outcome]:
        """The requests of all steps."""
        return sum((step.tally.outcomes for step in self.steps), Counter[Outcome]())

    @property
    def texts(self) -> Counter[tuple[Outcome, str]]:
        """The server's words in all steps, and this machine's."""
        return sum((step.tally.texts for step in self.steps), Counter[tuple[Outcome, str]]())

    @property
    def faults(self) -> tuple[str, ...]:
        """What is not good."""
        return tuple(_faults(self))

    @property
    def verdict(self) -> Verdict:
        """Whether it is good; a load that was cut short cannot be."""
        if self.faults:
            return Verdict.NOT_GOOD
        outcomes = self.outcomes
        unsure = self.stopped or outcomes[Outcome.NOT_SENT] or not outcomes[Outcome.SUCCEEDED]
        return Verdict.CANNOT_TELL if unsure else Verdict.GOOD

    @property
    def preemptions(self) -> float | None:
        """Preemptions of the whole run."""
        span = self.whole.engine(catalog.ENGINE_PREEMPTIONS)
        return None if span is None else span.grown


def _faults(report: Report) -> Iterator[str]:
    outcomes = report.outcomes
    if count := outcomes[Outcome.OUT_OF_MEMORY]:
        yield f"{count} answers were out of memory"
    if report.ended is not None:
        yield report.ended
    elif any(step.tally.engine_dead for step in report.steps):
        yield "the engine died: its web server says so"
    had_time = outcomes.total() - outcomes[Outcome.NOT_SENT] - (outcomes[Outcome.UNFINISHED] if report.stopped else 0)
    unserved = had_time - outcomes[Outcome.SUCCEEDED] - outcomes[Outcome.OUT_OF_MEMORY]
    if had_time and not outcomes[Outcome.SUCCEEDED]:
        yield "no request succeeded"
    elif unserved > TOLERATED_RATIO * had_time:
        yield f"{unserved} of {had_time} requests were not served"
    for memory in report.memory:
        if memory.growth.verdict is LeakVerdict.LEAKING:
            yield f"GPU {memory.name} leaks" if memory.kind is Kind.GPU else f"host memory of {memory.name} leaks"
