"""What a page reports about the server as a whole."""

from __future__ import annotations

import pytest

from tests.samples import engine, page
from vllm_headroom.derive.pages import count_finished, count_running, is_page_awake, list_named
from vllm_headroom.derive.run_identity import identify_run, is_new_run
from vllm_headroom.derive.sums import sum_known


@pytest.mark.parametrize(
    ("values", "expected_sum"), [((1.0, 2.0), 3.0), ((0.0,), 0.0), ((1.0, None), None), ((None,), None), ((), None)]
)
def test_the_sum_of_what_is_not_all_known_is_unknown(
    values: tuple[float | None, ...], expected_sum: float | None
) -> None:
    assert sum_known(values) == expected_sum


def test_engines_without_a_name_do_not_count() -> None:
    both = page(engine("0", running=2.0, finished_total=5.0), engine("1", model_name=""))

    assert [named_engine.engine for named_engine in list_named(both)] == ["0"]
    assert (count_running(both), count_finished(both)) == (2.0, 5.0)
    assert (count_running(page()), count_finished(page())) == (None, None)


def test_a_run_is_named_by_its_start() -> None:
    assert identify_run(page(engine())) is None
    assert identify_run(page(engine("0", started_at_seconds=2.0), engine("1", started_at_seconds=1.5))) == "1.500,2.000"


@pytest.mark.parametrize(
    ("run_before", "now", "anew"),
    [
        (("a", 5.0), ("a", 6.0), False),
        (("a", 5.0), ("b", 6.0), True),
        (("a", 5.0), ("a", 1.0), False),
        ((None, 5.0), (None, 4.0), False),
        ((None, 5.0), (None, 2.0), True),
        ((None, 5.0), ("b", 6.0), False),
        (("a", None), (None, 1.0), False),
        (("1000.000", 5.0), ("999.000", 4.0), False),
        (("1000.000", 5.0), ("999.000", 2.0), True),
        (("999.000", 5.0), ("1000.000", 6.0), True),
        (("7:999.00,8:999.00", 5.0), ("7:999.00", 6.0), True),
    ],
)
def test_what_is_unknown_or_began_earlier_tells_of_no_other_run(
    run_before: tuple[str | None, float | None], now: tuple[str | None, float | None], *, anew: bool
) -> None:
    assert is_new_run(run_before[0], now[0], run_before[1], now[1]) is anew


@pytest.mark.parametrize(
    ("awake_by_rank", "is_awake"),
    [((True, True), True), ((True, False), False), ((True, None), True), ((None, None), None)],
)
def test_one_engine_that_sleeps_is_a_server_that_sleeps(
    awake_by_rank: tuple[bool | None, ...], *, is_awake: bool | None
) -> None:
    assert (
        is_page_awake(
            page(*(engine(str(rank), awake=is_rank_awake) for rank, is_rank_awake in enumerate(awake_by_rank)))
        )
        is is_awake
    )


def test_an_engine_that_sleeps_runs_nothing_whatever_is_frozen_in_it() -> None:
    frozen = engine("0", running=3.0, awake=False)

    assert count_running(page(frozen)) == 0
    assert count_running(page(frozen, engine("1", running=4.0, awake=True))) == 4
    assert count_running(page(engine(running=None, awake=False))) is None
