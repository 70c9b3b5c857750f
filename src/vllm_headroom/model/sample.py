"""What is exported: metrics, their values, and what a scrape sees."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from vllm_headroom.vocabulary import MetricType


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
