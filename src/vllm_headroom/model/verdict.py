"""What is to be said, in the same words wherever a person looks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from vllm_headroom.model.sample import Metric, Sample
from vllm_headroom.vocabulary import Level


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One sentence on a GPU, the engine or its host memory; `alert` names the runbook that helps, None without one."""

    subject: str
    level: Level
    sentence: str
    alert: str | None = None


def worst(verdicts: Iterable[Verdict]) -> Level:
    """Return the level of the worst; unknown where there is none."""
    return max((verdict.level for verdict in verdicts), key=tuple(Level).index, default=Level.UNKNOWN)


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
