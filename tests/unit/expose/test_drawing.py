"""Curves as SVG."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from vllm_headroom.expose.drawing import (
    Forecast,
    Frame,
    build_curve,
    draw_curve,
    draw_forecast,
    draw_line,
    draw_mark,
    draw_picture,
    draw_zero,
    find_top,
    list_ticks,
    round_top,
    thin_curve,
)

FRAME = Frame(begin=0.0, end=100.0, top=10.0, width=100.0, height=10.0)


def test_a_curve_goes_from_time_and_value_to_right_and_up() -> None:
    assert draw_line(FRAME, [[(0.0, 0.0), (50.0, 5.0), (100.0, 10.0)]], kind="line") == (
        '<path class="line" d="M0.0 10.0L50.0 5.0L100.0 0.0"/>'
    )


def test_an_area_reaches_down_to_zero() -> None:
    assert draw_curve(FRAME, [[(0.0, 5.0), (50.0, 5.0)]]) == (
        '<path class="area" d="M0.0 5.0L50.0 5.0V10H0.0Z"/><path class="line" d="M0.0 5.0L50.0 5.0"/>'
    )


def test_what_is_above_the_top_stays_on_the_edge() -> None:
    assert draw_line(FRAME, [[(0.0, 0.0), (10.0, 1e12)]], kind="line").endswith('L10.0 0.0"/>')


@pytest.mark.parametrize(
    ("top", "unit", "rounded"), [(5.9, 1.0, 6.0), (11.5, 1.0, 12.0), (79.6, 1.0, 80.0), (3e9, 2**30, 3 * 2**30)]
)
def test_the_quarters_of_a_scale_are_round(top: float, unit: float, rounded: float) -> None:
    assert round_top(top, unit) == pytest.approx(rounded)


@pytest.mark.parametrize("span_seconds", [300.0, 3600.0, 86_400.0, 30 * 86_400.0])
def test_ticks_are_round_times_inside_the_span(span_seconds: float) -> None:
    begin = 1_760_000_040.0

    ticks = list_ticks(begin, begin + span_seconds)

    assert 2 <= len(ticks) <= 6
    assert all(begin <= tick <= begin + span_seconds and tick % 60 == 0 for tick in ticks)


def test_gaps_are_gaps() -> None:
    stretches = thin_curve(build_curve([(0.0, 1.0), (10.0, None), (20.0, None), (30.0, 1.0)]), 4)

    assert draw_line(FRAME, stretches, kind="line").count("M") == 2


def test_a_card_that_is_empty_for_a_moment_does_not_flatten_the_rest() -> None:
    assert find_top([None, *(19 * [10.0]), 80.0]) == pytest.approx(11.5)


def test_a_scale_ends_at_the_highest_value_or_at_what_there_can_be() -> None:
    assert find_top([5.0, 5.0]) == 5.0
    assert find_top([5.0, 5.0], limit=80.0) == pytest.approx(5.75)
    assert find_top([None]) == 1.0


def test_nothing_to_draw_is_nothing() -> None:
    assert (draw_line(FRAME, [], kind="line"), draw_curve(FRAME, [])) == ("", "")


def test_a_forecast_reaches_zero_when_it_says() -> None:
    drawn = draw_forecast(FRAME, Forecast(begin=50.0, value=5.0, seconds=40.0))

    assert drawn == '<path class="ahead" d="M50.0 5.0L90.0 10.0"/>'


def test_a_forecast_is_cut_off_at_the_frame() -> None:
    drawn = draw_forecast(FRAME, Forecast(begin=50.0, value=5.0, seconds=100.0, earliest_seconds=25.0))

    assert 'class="ahead" d="M50.0 5.0L100.0 7.5"' in drawn
    assert 'class="edge" d="M50.0 5.0L75.0 10.0' in drawn


def test_an_end_that_is_now_does_not_divide_by_zero() -> None:
    assert "L50.0 10.0" in draw_forecast(FRAME, Forecast(begin=50.0, value=5.0, seconds=0.0, earliest_seconds=0.0))


def test_a_mark_outside_is_not_drawn() -> None:
    assert draw_mark(FRAME, 200.0) == ""
    assert 'x1="50.0"' in draw_mark(FRAME, 50.0)


def test_a_picture_is_xml_and_says_what_it_shows() -> None:
    root = ET.fromstring(draw_picture(FRAME, (draw_zero(FRAME),), title="<free> & full"))  # noqa: S314 - of our own

    assert root.get("role") == "img"
    assert root.get("aria-label") == "<free> & full"


def test_a_title_from_outside_breaks_no_file() -> None:
    drawn = draw_picture(FRAME, (), title='GPU "0" <\x00\u202e>')

    assert ET.fromstring(drawn).get("aria-label") == r'GPU "0" <\x00\x202e>'  # noqa: S314 - it is our own
