"""`plan` beside starts of vLLM on real cards, and its table in the docs."""

from __future__ import annotations

from statistics import mean
from typing import Final

import pytest

from tests.assets.console import ROOT
from tests.assets.test_docs_tables import between
from tests.conftest import Golden
from tests.unit.sizing.starts import Start, plan_starts, render_table

PAGE: Final = ROOT / "docs/commands/plan.md"
STARTS: Final = plan_starts()
STARTED: Final = [start for start in STARTS if "refusal" not in start.logged]
MEASURED: Final = [start for start in STARTED if start.logged["release"] == "0.19" and start.logged["gpu"] == "H100"]

MEAN_ERROR_PERCENT: Final = 4.0
"""Of "at least" on the starts of the measured release and card, with one GPU and with more."""

OTHERS_MEAN_ERROR_PERCENT: Final = 4.0
"""The same on starts of other releases and cards, for which ranges are wider."""


def test_the_table_is_that_of_the_record(golden: Golden) -> None:
    golden(PAGE, between(PAGE.read_text(encoding="utf-8"), "starts", render_table()))


def test_the_cache_is_within_the_range_and_at_least_is_kept(subtests: pytest.Subtests) -> None:
    for start in STARTED:
        with subtests.test(start.name):
            low_gib, high_gib = start.cache_bounds_gib
            if "cache_gib" in start.logged:
                assert low_gib <= start.logged["cache_gib"] <= high_gib
            if "tokens" in start.logged:
                assert start.plan["kv_capacity_tokens"] <= start.logged["tokens"]
            assert start.plan["fits"] is not False


@pytest.mark.parametrize("is_spread", [False, True])
def test_at_least_is_near_what_was_logged(is_spread: bool) -> None:  # noqa: FBT001 - a case
    errors = [abs(start.error_percent) for start in MEASURED if start.is_spread is is_spread]

    assert len(errors) >= 4
    assert mean(errors) <= MEAN_ERROR_PERCENT


def test_at_least_is_near_what_other_releases_and_cards_logged() -> None:
    errors = [abs(start.error_percent) for start in STARTED if start not in MEASURED]

    assert len(errors) >= 6
    assert mean(errors) <= OTHERS_MEAN_ERROR_PERCENT


def test_parts_are_within_their_ranges(subtests: pytest.Subtests) -> None:
    for start in MEASURED:
        with subtests.test(start.name):
            assert is_within(start, "cuda_graph_bytes", "graphs_gib")


def is_within(start: Start, name: str, figure: str) -> bool:
    bounds = start.plan[name]
    return bool(round(bounds["low"] / 2**30, 2) <= start.logged[figure] <= round(bounds["high"] / 2**30, 2))


def test_a_start_that_failed_is_refused_for_vllms_reason() -> None:
    failed = [start for start in STARTS if "refusal" in start.logged]

    assert failed
    for start in failed:
        assert start.plan["fits"] is False
        assert start.logged["refusal"] in start.headline
