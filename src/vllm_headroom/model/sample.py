"""What is derived: metrics and their values, what a scrape sees of them, and what is said in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from msgspec import Struct

from vllm_headroom.vocabulary import Level, MetricType


class Metric(Struct, frozen=True, kw_only=True):
    """One exported family, a counter's name in `_total`; `needs` are the engine's facts that it is absent without."""

    name: str
    kind: MetricType
    labels: tuple[str, ...]
    help: str
    needs: tuple[str, ...] = ()


class Sample(NamedTuple):
    """One value of a metric; `labels` are the values in the order of `metric.labels`.

    A tick makes hundreds, and reads them through once: a tuple is unpacked at once.
    """

    metric: Metric
    labels: tuple[str, ...]
    value: float


class Published(Struct, frozen=True, kw_only=True):
    """What a scrape sees: the samples of one tick and when that tick ended."""

    samples: tuple[Sample, ...]
    monotonic_seconds: float


class Values:
    """The samples of one tick, by metric and labels."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._families: defaultdict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
        for metric, labels, value in samples:
            self._families[metric.name][labels] = value

    def of(self, metric: Metric) -> dict[tuple[str, ...], float]:
        """Return a metric's values by their labels."""
        return self._families.get(metric.name, {})

    def value(self, metric: Metric, *labels: str) -> float | None:
        """Return one value, None where it is not known."""
        return self.of(metric).get(labels)

    def state(self, metric: Metric, *labels: str) -> str | None:
        """Return the one state that is 1, of a metric whose last label is the state."""
        return next((found[-1] for found, value in self.of(metric).items() if value and found[:-1] == labels), None)


class Verdict(Struct, frozen=True, kw_only=True):
    """One sentence on a GPU, the engine or its host memory; `alert` names the runbook that helps, None without one."""

    subject: str
    level: Level
    sentence: str
    alert: str | None = None


def worst(verdicts: Iterable[Verdict]) -> Level:
    """Return the level of the worst; unknown where there is none."""
    return max((verdict.level for verdict in verdicts), key=tuple(Level).index, default=Level.UNKNOWN)
