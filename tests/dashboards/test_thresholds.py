"""Where a panel begins to warn is where an alert does."""

from __future__ import annotations

import re
from typing import Any, Final

import pytest

from tests.assets import alerts
from tests.dashboards.grafana import load, panels

RULES: Final = {rule.name: rule.expr for rule in alerts.rules() if rule.is_alert}
MIB: Final = 2**20

SAME: Final = (
    ("headroom", "Likely out of memory", 3_600, "HeadroomOutOfMemorySoon", "3600"),
    ("headroom", "Likely out of memory", 86_400, "HeadroomGpuMemoryLeak", "86400"),
    ("headroom", "Out of memory at the earliest", 3_600, "HeadroomOutOfMemorySoon", "3600"),
    ("headroom", "Free now", 512 * MIB, "HeadroomGpuMemoryLow", "512 * 2^20"),
    ("headroom", "Headroom: free memory of each GPU", 512 * MIB, "HeadroomGpuMemoryLow", "512 * 2^20"),
    ("headroom", "Held by others", 2**30, "HeadroomNeighbourGrowing", "2^30"),
    ("headroom", "Unreported", 0.03, "HeadroomMemoryDiscrepancy", "0.03"),
    ("headroom", "Unreported", 0.04, "HeadroomMemoryDiscrepancyHigh", "0.04"),
    ("headroom", "Temperature", 87, "HeadroomGpuHot", "87"),
    ("headroom", "Prefix cache hit ratio", 0.3, "HeadroomPrefixCacheNotPaying", "0.3"),
    ("headroom-fleet", "Out of memory at the earliest", 3_600, "HeadroomOutOfMemorySoon", "3600"),
    ("headroom-fleet", "Out of memory at the earliest", 86_400, "HeadroomGpuMemoryLeak", "86400"),
    ("headroom-incident", "Free memory of each GPU", 512 * MIB, "HeadroomGpuMemoryLow", "512 * 2^20"),
)


def test_a_panel_warns_where_its_alert_does(subtests: pytest.Subtests) -> None:
    for name, title, value, alert, written in SAME:
        with subtests.test(name, title=title):
            assert value in steps(panel(name, title))
            assert re.search(rf"(?<![\w.]){re.escape(written)}(?![\w.])", RULES[alert])


def test_no_other_panel_of_numbers_or_lines_warns_at_a_figure_of_its_own() -> None:
    named = {(name, title) for name, title, *_ in SAME}
    own = {
        (name, board_panel["title"])
        for name in ("headroom", "headroom-fleet", "headroom-incident")
        for board_panel in panels(load(name))
        if any(value not in {0, 1} for value in steps(board_panel))
    }

    # A day's leak and an hour's are reported by the same rules, by model.
    assert own - named == {("headroom-fleet", "Likely time to out of memory, by model")}


def panel(name: str, title: str) -> dict[str, Any]:
    return next(panel for panel in panels(load(name)) if panel["title"] == title)


def steps(panel: dict[str, Any]) -> set[float]:
    return {step["value"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]} - {None}
