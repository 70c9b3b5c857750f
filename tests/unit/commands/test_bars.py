"""Curves of block characters."""

from __future__ import annotations

from vllm_headroom_tools.terminal import bars


def test_bars_fall_as_the_memory_does() -> None:
    assert bars([(0.0, 4.0), (1.0, 3.0), (2.0, 2.0), (3.0, 1.0)], 4, 1) == ["█▆▄▂"]
    assert bars([(0.0, 8.0), (1.0, 4.0)], 2, 2) == ["█", "██"]


def test_gaps_are_blank_and_what_is_left_is_never_nothing() -> None:
    assert bars([(0.0, 8.0), (1.0, None), (2.0, 0.001)], 3, 1) == ["█ ▁"]
    assert bars([], 3, 1) == [""]


def test_fewer_points_than_columns_fill_the_width() -> None:
    assert bars([(0.0, 1.0), (1.0, 1.0)], 6, 1) == ["██████"]
    assert bars([(5.0, 1.0)], 3, 1) == ["███"]


def test_a_column_is_a_stretch_of_time_however_many_points_are_in_it() -> None:
    crowded = [(second / 100, 8.0) for second in range(100)]

    assert bars([*crowded, (2.0, 4.0), (3.0, 4.0), (4.0, 4.0)], 4, 1) == ["█▄▄▄"]
    assert bars([(4.0, 4.0), (0.0, 8.0), (2.0, 8.0)], 4, 1) == ["████"[:3] + "▄"]


def test_the_lowest_or_the_highest_of_a_stretch_is_shown() -> None:
    peak = [(0.0, 4.0), (1.0, 8.0), (2.0, 4.0), (3.0, 4.0)]

    assert bars(peak, 1, 1, ends=(0.0, 8.0)) == ["▄"]
    assert bars(peak, 1, 1, pick=max) == ["█"]


def test_an_axis_may_begin_above_zero() -> None:
    assert bars([(0.0, 100.0), (1.0, 104.0), (2.0, 108.0)], 3, 1, ends=(100.0, 108.0)) == ["▁▄█"]
