"""The published samples as Prometheus families, built afresh for every scrape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from vllm_headroom import catalog
from vllm_headroom.model import Metric, Published, Sample
from vllm_headroom.vocabulary import MetricType

Family = GaugeMetricFamily | CounterMetricFamily


class HeadroomCollector(Collector):
    """Turns what `published` returns (None before the first sample) into families; does no I/O and does not raise.

    `incident` returns when the newest one was, None without one.
    """

    def __init__(
        self,
        published: Callable[[], Published | None],
        monotonic: Callable[[], float],
        build: tuple[str, str, str],
        incident: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.published = published
        self._monotonic = monotonic
        self._incident = incident
        self._build = Sample(catalog.BUILD_INFO, build, 1.0)

    def describe(self) -> Iterator[Family]:
        """Yield every family there can be, so that a scraper may ask for some by `name[]`."""
        return (_family(metric, []) for metric in catalog.METRICS)

    def collect(self) -> Iterator[Family]:
        """Yield the families that have a sample, in the catalogue's order."""
        groups: defaultdict[str, list[Sample]] = defaultdict(list)
        for sample in self.samples():
            groups[sample.metric.name].append(sample)
        return (_family(metric, groups[metric.name]) for metric in catalog.METRICS if metric.name in groups)

    def samples(self) -> list[Sample]:
        """Return all there is to show now."""
        published = self.published()
        if published is None:
            return [self._build]
        at = self._incident()
        incident = [] if at is None else [Sample(catalog.LAST_INCIDENT, (), at)]
        return [self._build, Sample(catalog.SAMPLE_AGE, (), self.age_seconds(published)), *incident, *published.samples]

    def age_seconds(self, published: Published) -> float:
        """Return how long ago its tick ended."""
        return max(0.0, self._monotonic() - published.monotonic_seconds)


def _family(metric: Metric, samples: list[Sample]) -> Family:
    kind = CounterMetricFamily if metric.kind is MetricType.COUNTER else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    for sample in samples:
        family.add_metric(sample.labels, sample.value)
    return family


def registry(collector: HeadroomCollector) -> CollectorRegistry:
    """Return a registry of its own with `collector` and the daemon's own process_* series."""
    own = CollectorRegistry(auto_describe=False)
    own.register(collector)
    ProcessCollector(registry=own)
    return own
