"""The windowed hit ratio."""

from __future__ import annotations

import pytest

from tests.samples import AN_ENGINE, engine, failure, page, snapshot, values
from vllm_headroom import catalog
from vllm_headroom.derive.prefix_cache import (
    RATIO_WINDOW_SECONDS,
    RATIO_WINDOW_STEPS,
    PrefixCacheState,
    derive_prefix_cache,
)
from vllm_headroom.model import EnginePage, Failure, Sample
from vllm_headroom.vocabulary import Source


def counters(queries: float, hits: float) -> EnginePage:
    return page(engine(prefix_queries_total=queries, prefix_hits_total=hits))


def ratio_after(*pages: tuple[float, EnginePage | Failure]) -> float | None:
    state = PrefixCacheState()
    samples: tuple[Sample, ...] = ()
    for at, page_or_failure in pages:
        state, samples = derive_prefix_cache(state, snapshot(at=at, engines=page_or_failure))
    return values(samples, catalog.ENGINE_PREFIX_HIT_RATIO).get(AN_ENGINE)


def test_the_first_reading_says_nothing_about_the_last_minutes() -> None:
    assert ratio_after((0, counters(1000, 900))) is None


def test_the_ratio_is_of_the_increases() -> None:
    assert ratio_after((0, counters(1000, 900)), (5, counters(1100, 925))) == 0.25


def test_without_queries_there_is_no_ratio() -> None:
    assert ratio_after((0, counters(1000, 900)), (5, counters(1000, 900))) is None


def test_increases_older_than_five_minutes_no_longer_count() -> None:
    assert (
        ratio_after((0, counters(0, 0)), (5, counters(100, 100)), (200, counters(200, 100)), (310, counters(300, 150)))
        == 0.25
    )


def test_a_quiet_window_forgets_the_ratio() -> None:
    assert ratio_after((0, counters(0, 0)), (5, counters(100, 100)), (400, counters(100, 100))) is None


def test_a_counter_that_fell_began_again_from_zero() -> None:
    assert ratio_after((0, counters(1000, 900)), (5, counters(40, 10))) == 0.25


def test_what_a_run_counted_ends_with_it() -> None:
    pages_before = ((0.0, counters(0, 0)), (5.0, counters(1000, 900)))

    assert ratio_after(*pages_before, (10.0, counters(0, 0))) is None
    assert ratio_after(*pages_before, (10.0, counters(0, 0)), (15.0, counters(40, 10))) == 0.25


def test_hits_that_fell_tell_a_restart_even_where_the_queries_have_overtaken_what_they_were() -> None:
    assert ratio_after((0, counters(100, 90)), (5, counters(200, 20))) == 0.1


def test_hits_cannot_exceed_queries() -> None:
    assert ratio_after((0, counters(0, 0)), (5, counters(10, 12))) == 1.0


def test_a_failed_page_shows_no_ratio_and_keeps_the_window() -> None:
    pages_before = ((0.0, counters(0, 0)), (5.0, counters(100, 50)), (10.0, failure(Source.ENGINE)))

    assert ratio_after(*pages_before) is None
    assert ratio_after(*pages_before, (15.0, counters(100, 50))) == 0.5


def test_an_engine_off_the_page_is_forgotten_after_a_window() -> None:
    state, _ = derive_prefix_cache(PrefixCacheState(), snapshot(at=0, engines=counters(1, 1)))
    state, _ = derive_prefix_cache(state, snapshot(at=RATIO_WINDOW_SECONDS + 1, engines=page()))

    assert state.engines == {}


def test_v0_without_counters_shows_its_own_lifetime_ratio() -> None:
    assert ratio_after((0, page(engine(prefix_hit_lifetime_ratio=0.9)))) == 0.9


@pytest.mark.parametrize("interval", [0.1, 1.0, 5.0, 15.0])
def test_the_memory_is_bounded_at_any_interval(interval: float) -> None:
    state = PrefixCacheState()
    for turn in range(round(700 / interval)):
        state, _ = derive_prefix_cache(state, snapshot(at=turn * interval, engines=counters(turn, turn)))

    assert len(state.engines[AN_ENGINE]) <= RATIO_WINDOW_STEPS + 2
