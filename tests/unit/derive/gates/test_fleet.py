"""Requests lost without gates, with one and with both; the table of docs/gates.md is made from these runs."""

from __future__ import annotations

from typing import Final

import pytest

from tests.assets.console import ROOT
from tests.assets.test_docs_tables import between
from tests.conftest import Golden
from tests.unit.derive.gates.fleet import DAY, HOUR, Counts, fleet

LEFT: Final = 600.0


@pytest.fixture(scope="module")
def runs() -> dict[str, Counts]:
    return {
        "no gate": fleet(ready_seconds=None, live_seconds=None),
        "`/gate/ready`": fleet(ready_seconds=LEFT, live_seconds=None),
        "`/gate/live`": fleet(ready_seconds=None, live_seconds=6 * HOUR),
        "both": fleet(ready_seconds=LEFT, live_seconds=6 * HOUR),
    }


def lost(counts: Counts) -> float:
    return counts.lost + counts.nobody


def test_engines_that_leak_crash_and_lose_what_runs(runs: dict[str, Counts]) -> None:
    assert len(runs["no gate"].crashes) >= 8
    assert lost(runs["no gate"]) > 500


def test_with_both_none_crashes_and_hardly_a_request_is_lost(runs: dict[str, Counts]) -> None:
    assert lost(runs["both"]) < 0.1 * lost(runs["no gate"])
    assert runs["both"].crashes == []


def test_the_ready_gate_alone_mends_no_leak_and_costs_nothing(runs: dict[str, Counts]) -> None:
    assert lost(runs["`/gate/ready`"]) == pytest.approx(lost(runs["no gate"]), rel=0.15)
    assert runs["`/gate/ready`"].served == pytest.approx(runs["no gate"].served, rel=0.001)


def test_restarts_are_at_night(runs: dict[str, Counts]) -> None:
    hours = [moment % DAY / HOUR for moment in runs["both"].restarts]

    assert hours
    assert sum(hour >= 22 or hour < 7 for hour in hours) >= 0.7 * len(hours)


def test_the_service_is_never_empty(runs: dict[str, Counts]) -> None:
    assert {counts.nobody for counts in runs.values()} == {0.0}


def test_the_documents_table_is_that_of_these_runs(golden: Golden, runs: dict[str, Counts]) -> None:
    rows = [
        f"| {name} | {counts.served:,.0f} | {lost(counts):,.0f} | {len(counts.crashes)} | {len(counts.restarts)} |"
        for name, counts in runs.items()
    ]
    head = ("| gates | served | lost | out of memory | restarted by `/gate/live` |", "| --- | --- | --- | --- | --- |")
    document = ROOT / "docs" / "gates.md"

    golden(document, between(document.read_text(encoding="utf-8"), "gates", "\n".join((*head, *rows))))
