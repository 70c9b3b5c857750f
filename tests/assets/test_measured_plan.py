"""What `plan` reports about models that a real vLLM sized on the stand-in card, and its table in the docs."""

from __future__ import annotations

import json
from typing import Final

import pytest

from tests.assets.console import ROOT
from tests.assets.test_docs_tables import between
from tests.card.shapes.compare import RECORD, compare_all, compare_releases, render_releases, render_table
from tests.conftest import Golden
from vllm_headroom_tools.sizing.releases import NEWEST_RELEASE

PAGE: Final = ROOT / "docs/commands/plan.md"
COMPARED: Final = compare_all()
NAMES: Final = [comparison.shape.name for comparison in COMPARED]
SIZED: Final = [comparison for comparison in COMPARED if comparison.plan and comparison.started]
OTHER_RELEASES: Final = compare_releases()

WEIGHTS_PERCENT: Final = 2.0
"""vLLM counts what torch took of the card: parameters, rounded up to its segments, and tables of positions."""

TOKENS_PERCENT: Final = 18.0
"""By how much the least number of tokens may be too low, which is most where weights nearly fill the card."""

WEIGHTS_MISSED: Final = {
    "Qwen2.5 7B AWQ": "what repacking for Marlin leaves between torch's segments",
    "gpt-oss 20B": "the card's kernels pad the experts in one dimension, those of real cards in both",
}
ACTIVATIONS_MISSED: Final = {"Qwen3 Embedding 0.6B": "it pools, which `plan` does not know, and computes no logits"}
ENOUGH: Final = 15


def test_every_measured_model_is_compared() -> None:
    assert sorted(json.loads(RECORD.read_text(encoding="utf-8"))) == sorted(NAMES)
    assert len(NAMES) >= ENOUGH


def test_the_table_is_that_of_the_record(golden: Golden) -> None:
    golden(PAGE, between(PAGE.read_text(encoding="utf-8"), "measured", render_table()))


def test_a_verdict_is_vllms(subtests: pytest.Subtests) -> None:
    for comparison in COMPARED:
        with subtests.test(comparison.shape.name):
            verdict = comparison.plan.get("fits")

            assert verdict is None or verdict is comparison.started


def test_weights_are_what_vllm_loaded(subtests: pytest.Subtests) -> None:
    for measured_plan in SIZED:
        with subtests.test(measured_plan.shape.name):
            is_near = measured_plan.weights_error is None or abs(measured_plan.weights_error) <= WEIGHTS_PERCENT

            assert is_near is (measured_plan.shape.name not in WEIGHTS_MISSED)


def test_the_peak_of_activations_is_within_the_range(subtests: pytest.Subtests) -> None:
    for measured_plan in SIZED:
        with subtests.test(measured_plan.shape.name):
            assert measured_plan.holds("activation_bytes", "activations_gib") in {
                None,
                measured_plan.shape.name not in ACTIVATIONS_MISSED,
            }


def test_the_cache_is_within_the_range_and_its_tokens_are_a_lower_bound(subtests: pytest.Subtests) -> None:
    for measured_plan in SIZED:
        with subtests.test(measured_plan.shape.name):
            assert measured_plan.holds("kv_cache_bytes", "available_gib") is not False
            if measured_plan.tokens_error is not None:
                assert -TOKENS_PERCENT <= measured_plan.tokens_error <= 0


def test_the_table_of_releases_is_that_of_the_record(golden: Golden) -> None:
    golden(PAGE, between(PAGE.read_text(encoding="utf-8"), "releases", render_releases()))


def test_at_least_three_releases_are_measured_with_the_newest() -> None:
    releases = {comparison.shape.release for comparison in OTHER_RELEASES}

    assert len(releases) >= 3
    assert NEWEST_RELEASE.version in releases


def test_each_release_keeps_what_is_planned_for_it(subtests: pytest.Subtests) -> None:
    for measured_plan in OTHER_RELEASES:
        with subtests.test(f"{measured_plan.shape.name}, {measured_plan.shape.release}"):
            assert measured_plan.holds("kv_cache_bytes", "available_gib") is True
            assert measured_plan.holds("activation_bytes", "activations_gib") is not False
            assert measured_plan.tokens_error is not None
            assert measured_plan.tokens_error <= 0
