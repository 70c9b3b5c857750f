from __future__ import annotations

from math import ceil
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_headroom.commands.load.tally import EXACT_VALUES, Quantiles

SHARES = (0.0, 0.01, 0.5, 0.95, 0.99, 1.0)


def of(values: list[float]) -> Quantiles:
    quantiles = Quantiles()
    for value in values:
        quantiles.add(value)
    return quantiles


def true(values: list[float], share: float) -> float:
    return sorted(values)[max(1, ceil(share * len(values))) - 1]


def test_nothing_has_no_quantile() -> None:
    assert of([]).at(0.5) is None


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=50), st.sampled_from(SHARES))
def test_few_values_have_exact_quantiles(values: list[float], share: float) -> None:
    assert of(values).at(share) == true(values, share)


@pytest.mark.parametrize("share", SHARES)
def test_many_values_have_quantiles_within_a_per_cent(share: float) -> None:
    random = Random(1)  # noqa: S311 - not for secrets
    values = [random.lognormvariate(-3, 2) for _ in range(EXACT_VALUES + 5000)]
    quantiles = of(values)

    assert quantiles.count == len(values)
    assert quantiles.at(share) == pytest.approx(true(values, share), rel=0.01)


def test_many_values_take_no_more_memory_than_some() -> None:
    random = Random(2)  # noqa: S311 - not for secrets
    quantiles = of([random.uniform(0, 100) for _ in range(5 * EXACT_VALUES)])

    assert not quantiles._values
    assert len(quantiles._bins) < 1000


def test_what_came_at_once_counts_as_a_microsecond_among_many() -> None:
    assert of([0.0] * (EXACT_VALUES + 1)).at(0.5) == pytest.approx(1e-6, rel=0.01)
