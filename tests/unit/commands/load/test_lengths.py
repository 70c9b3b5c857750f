from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_headroom_tools.load.order import Lengths, parse_lengths


@pytest.mark.parametrize(
    ("text", "shortest", "longest"),
    [("512", 512, 512), ("256..2048", 256, 2048), (" 1..1 ", 1, 1), ("1..9999999", 1, 9999999)],
)
def test_a_length_or_two_ends_are_a_distribution(text: str, shortest: int, longest: int) -> None:
    assert parse_lengths(text) == Lengths(shortest=shortest, longest=longest)
    assert parse_lengths(str(parse_lengths(text))) == parse_lengths(text)


@pytest.mark.parametrize(
    "text", ["", "0", "0..4", "5..4", "-1", "1.5", "1..", "..4", "1...4", "10000000", "٣", "1..2..3"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the option has the words
        parse_lengths(text)


@given(st.integers(1, 10**7), st.integers(1, 10**7), st.floats(0, 1, exclude_max=True))
def test_every_length_drawn_is_between_the_ends(first_length: int, second: int, chance: float) -> None:
    drawn = Lengths(shortest=min(first_length, second), longest=max(first_length, second)).draw(chance)

    assert min(first_length, second) <= drawn <= max(first_length, second)


def test_each_doubling_is_as_likely_as_the_next() -> None:
    drawn = Counter(Lengths(shortest=1, longest=1023).draw(chance / 10_000).bit_length() for chance in range(10_000))

    assert set(drawn) == set(range(1, 11))
    assert max(drawn.values()) - min(drawn.values()) <= 2
