"""What is exported: metrics, their values, and what a scrape sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from vllm_headroom.vocabulary import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One exported family, a counter's name in `_total`; `needs` are the engine's facts that it is absent without."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    needs: tuple[str, ...] = ()


class Sample(NamedTuple):
    """One value of a metric; `labels` are the values in the order of `metric.labels`.

    A tick makes hundreds: a tuple is made in half the time of a frozen dataclass.
    """

    metric: Metric
    labels: tuple[str, ...]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What a scrape sees: the samples of one tick and when that tick ended."""

    samples: tuple[Sample, ...]
    monotonic_seconds: float
