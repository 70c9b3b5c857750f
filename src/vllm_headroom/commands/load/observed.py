"""What the samples of a stretch of time showed of memory and of the engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from operator import add
from typing import Final

from msgspec import Struct

from vllm_headroom import catalog
from vllm_headroom.derive.readings import gpu_labels
from vllm_headroom.model import EnginePage, Failure, Metric, Sample, Snapshot
from vllm_headroom.trace.counter import Histogram
from vllm_headroom.vocabulary import Reason, Source

Labels = tuple[str, ...]
"""Index and UUID of a GPU, or the role of processes."""

MEDIAN: Final = 0.5
GONE: Final = "the engine is gone: its page refuses connections"
COMBINED: Final[dict[Metric, Callable[[float, float], float]]] = {
    catalog.ENGINE_RUNNING: add,
    catalog.ENGINE_WAITING: add,
    catalog.ENGINE_PREEMPTIONS: add,
    catalog.ENGINE_FINISHED: add,
    catalog.ENGINE_KV_USED: max,
}
"""How the figures of several engines are one: of KV caches the fullest counts."""


class Span(Struct):
    """A figure over time: its first, newest and highest value, and whether it ever fell."""

    first: float
    last: float
    most: float
    fell: bool = False


class Spans(dict[Labels, Span]):
    """The span of each series of one figure."""

    def take(self, labels: Labels, value: float) -> None:
        """Take the next value of a series."""
        span = self.setdefault(labels, Span(value, value, value))
        span.fell = span.fell or value < span.last
        span.last, span.most = value, max(span.most, value)


class Observed:
    """Takes the samples of a stretch; what none of them told is absent.

    `failures` has, of each source that failed, in how many of the samples, and the newest failure.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.failures: dict[Source, tuple[int, Failure]] = {}
        self.first: Snapshot | None = None
        self.last: Snapshot | None = None
        self.held = Spans()
        self.host = Spans()
        self._engine = Spans()
        self._per_request: defaultdict[Labels, Histogram] = defaultdict(Histogram)

    def take(self, snapshot: Snapshot, samples: Iterable[Sample]) -> None:
        """Take one tick: what was read, and what the daemon derives of it."""
        self._note(snapshot)
        for gpu in snapshot.devices:
            if gpu.held_bytes is not None:
                self.held.take(gpu_labels(gpu), gpu.held_bytes)
        engine: defaultdict[str, float] = defaultdict(float)
        for sample in samples:
            name = sample.metric.name
            if sample.metric is catalog.MEMORY_PER_RUNNING_REQUEST:
                self._per_request[sample.labels].add(sample.value)
            elif sample.metric is catalog.HOST_MEMORY:
                self.host.take(sample.labels, sample.value)
            elif sample.metric in COMBINED:
                engine[name] = COMBINED[sample.metric](engine[name], sample.value)
        for name, value in engine.items():
            self._engine.take((name,), value)

    def _note(self, snapshot: Snapshot) -> None:
        self.samples += 1
        self.first, self.last = self.first or snapshot, snapshot
        for failure in snapshot.failures:
            count, _ = self.failures.get(failure.source, (0, failure))
            self.failures[failure.source] = (count + 1, failure)

    def engine(self, metric: Metric) -> Span | None:
        """Return the span of one of the engine's figures; None where the engine did not tell it."""
        return self._engine.get((metric.name,))

    def grown(self, metric: Metric) -> float | None:
        """Return what one of the engine's counters counted; None where it did not tell it, or began anew."""
        span = self.engine(metric)
        return None if span is None or span.fell else span.last - span.first

    @property
    def seconds(self) -> float:
        """The time from the first sample to the newest."""
        if self.first is None or self.last is None:
            return 0.0
        return self.last.monotonic_seconds - self.first.monotonic_seconds

    @property
    def ended(self) -> str | None:
        """How the engine ended meanwhile: it is gone, or another started; None where it did not."""
        first = None if self.first is None else self.first.engines
        last = None if self.last is None else self.last.engines
        if not isinstance(first, EnginePage) or last is None:
            return None
        if isinstance(last, Failure):
            return GONE if last.reason is Reason.UNREACHABLE else None
        began, ends = _starts(first), _starts(last)
        return "the engine was restarted meanwhile" if began and ends and began != ends else None

    def bytes_per_request(self, labels: Labels) -> float | None:
        """Return the median of what a running request cost on a GPU; None where nothing was seen to run."""
        return self._per_request[labels].quantile(MEDIAN) if labels in self._per_request else None


def _starts(page: EnginePage) -> frozenset[float]:
    return frozenset(engine.started_at_seconds for engine in page.engines if engine.started_at_seconds is not None)
