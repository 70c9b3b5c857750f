"""A page in Prometheus's text format, by metric and labels."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

from prometheus_client.parser import text_string_to_metric_families

from vllm_headroom.model import Metric
from vllm_headroom.vocabulary import LeakState

Labels = dict[str, str]


class Page:
    """The values of one page, by metric and labels."""

    def __init__(self, text: str) -> None:
        """Raise ValueError where the text is not in Prometheus's format."""
        self._samples: dict[str, list[tuple[Labels, float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if isfinite(sample.value):
                    self._samples.setdefault(sample.name, []).append((sample.labels, sample.value))

    def each(self, metric: Metric, **wanted: str) -> Iterator[tuple[Labels, float]]:
        """Yield the labels and value of each series of a metric that has these labels."""
        for labels, value in self._samples.get(metric.name, ()):
            if wanted.items() <= labels.items():
                yield labels, value

    def value(self, metric: Metric, **wanted: str) -> float | None:
        """Return the value of the one series with these labels; None where there is none, or more."""
        values = [value for _, value in self.each(metric, **wanted)]
        return values[0] if len(values) == 1 else None

    def state(self, metric: Metric, **wanted: str) -> LeakState:
        """Return the one state that is 1, unknown where none is or several are."""
        names = {labels.get("state") for labels, value in self.each(metric, **wanted) if value}
        states = [state for state in LeakState if state in names]
        return states[0] if len(states) == 1 else LeakState.UNKNOWN
