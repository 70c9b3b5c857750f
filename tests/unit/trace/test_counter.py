"""Quantiles of values that are counted to three digits."""

from __future__ import annotations

from math import ceil
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_headroom_tools.history import Histogram

SHARES = (0.0, 0.01, 0.5, 0.95, 0.99, 1.0)


def of(values: list[float]) -> Histogram:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    return histogram


def true(values: list[float], share: float) -> float:
    return sorted(values)[max(1, ceil(share * len(values))) - 1]


def test_nothing_has_no_quantile() -> None:
    assert of([]).quantile(0.5) is None


@given(st.lists(st.integers(0, 999).map(float), min_size=1, max_size=50), st.sampled_from(SHARES))
def test_values_of_three_digits_have_exact_quantiles(values: list[float], share: float) -> None:
    assert of(values).quantile(share) == true(values, share)


@pytest.mark.parametrize("share", SHARES)
def test_all_values_have_quantiles_within_half_a_per_cent(share: float) -> None:
    random = Random(1)  # noqa: S311 - not for secrets
    values = [random.lognormvariate(-3, 2) for _ in range(15_000)]

    assert of(values).quantile(share) == pytest.approx(true(values, share), rel=0.005)


def test_many_values_take_no_more_memory_than_some() -> None:
    random = Random(2)  # noqa: S311 - not for secrets
    histogram = of([random.uniform(0, 100) for _ in range(50_000)])

    assert len(histogram.counts) < 3000
