"""A card in MIG instances, which share its number: the boards tell them apart, and leave out those of others."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.dashboards.asking import answer, options, values
from tests.dashboards.cards import INSTANCES
from tests.dashboards.grafana import AUTO, Json, load, panels, queries
from tests.dashboards.lint_names import LABEL
from tests.dashboards.store import TARGETS, Prometheus

MINE, ALSO_MINE, _ = INSTANCES

each_board = pytest.mark.parametrize("name", ["headroom", "headroom-incident"])


@each_board
def test_no_two_series_of_a_panel_have_one_name(prometheus: Prometheus, name: str) -> None:
    board = load(name)
    twice = {panel["title"]: shown for panel in panels(board) if (shown := names(prometheus, board, panel, twice=True))}

    assert twice == {}


@each_board
def test_a_gpu_is_called_as_in_the_alerts(prometheus: Prometheus, name: str) -> None:
    board = load(name)
    shown = {
        shown_name
        for panel in panels(board)
        for shown_name in names(prometheus, board, panel)
        if shown_name.startswith("GPU")
    }

    assert {"GPU 1 MIG-aaaaaaaa", "GPU 1 MIG-bbbbbbbb"} <= shown
    assert "GPU 1" not in shown


@each_board
def test_the_engines_instances_are_offered_and_no_others(prometheus: Prometheus, name: str) -> None:
    assert sorted(options(prometheus, load(name), TARGETS["MIG"].labels)["uuid"]) == [MINE, ALSO_MINE]


def names(prometheus: Prometheus, board: Json, panel: Json, *, twice: bool = False) -> set[str]:
    """Return what the series of a panel are called, or those names that more than one has."""
    chosen = {**TARGETS["MIG"].labels, **({"uuid": MINE} if "repeat" in panel else {})}
    put_in = values(prometheus, board, chosen)
    name_counts = Counter(
        LABEL.sub(lambda label, series=result: series["metric"].get(label[1], ""), query.legend)  # type: ignore[misc]
        for query in queries(panel)
        if panel["type"] != "table" and query.legend != AUTO
        for result in answer(prometheus, query, put_in)
    )
    return {name for name, count in name_counts.items() if count > twice}
