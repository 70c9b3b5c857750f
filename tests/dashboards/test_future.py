"""The engine's dashboard shows what will be, what each run of an engine is like, and where nobody looks."""

from __future__ import annotations

from typing import Any, Final

import pytest

from dashboards.source.panels import NOTHING
from tests.dashboards.asking import values
from tests.dashboards.cards import LEAKING
from tests.dashboards.grafana import filled, load, panels, queries
from tests.dashboards.store import BEGIN, NOW, TARGETS, Prometheus
from tests.dashboards.test_story import ENGINE, HERO, ask_panel, query, read_tile

GIB: Final = 2**30
AHEAD_SECONDS: Final = 12 * 3600
GROWS: Final = "growing|leaking"


def ahead(prometheus: Prometheus, target: str, name: str, states: str = GROWS) -> list[tuple[float, float]]:
    """Return what the largest panel draws under a name, where the time shown ends in the future.

    With other `states` it is as if those were meant by a leak.
    """
    put_in = values(prometheus, ENGINE, TARGETS[target].labels) | {"__range": f"{NOW - BEGIN + AHEAD_SECONDS}s"}
    form = {"start": str(BEGIN), "end": str(NOW + AHEAD_SECONDS), "step": "60"}
    expr = filled(query(ENGINE, HERO, name).expr, put_in).replace(GROWS, states)
    answer = prometheus.ask("query_range", query=expr, **form)["result"]
    return [(float(at), float(value)) for found_series in answer for at, value in found_series["values"]]


def test_what_a_leak_will_leave_is_drawn_from_now_to_zero(prometheus: Prometheus) -> None:
    expected, earliest_line = (
        ahead(prometheus, "leak", f"GPU {{{{gpu}}}} {name}") for name in ("expected", "at the earliest")
    )
    likely_seconds, earliest = (
        float(read_tile(prometheus, "leak", name)) for name in ("Likely out of memory", "Out of memory at the earliest")
    )
    (free,) = ask_panel(prometheus, "leak", "Free now")

    assert NOW < expected[0][0] < NOW + 240
    assert expected[0][1] == pytest.approx(float(free["values"][-1][1]), rel=0.02)
    for line, seconds in ((expected, likely_seconds), (earliest_line, earliest)):
        assert line == sorted(line, key=lambda point: -point[1])
        assert next(at for at, value in line if value == 0) == pytest.approx(NOW + seconds, abs=90)


@pytest.mark.parametrize("target", ["healthy", "restart", "asleep", "engine down"])
def test_without_a_leak_no_future_is_drawn(prometheus: Prometheus, target: str) -> None:
    assert ahead(prometheus, target, "GPU {{gpu}} expected") == []


def test_a_leak_that_was_seen_before_and_is_none_now_has_no_future(prometheus: Prometheus) -> None:
    assert ahead(prometheus, "leak", "GPU {{gpu}} expected", states="stable|asleep") == []


def test_what_is_of_now_stays_of_now_where_the_time_shown_ends_in_the_future() -> None:
    of_now = [panel for panel in panels(ENGINE) if panel["type"] in {"stat", "table"}]

    assert {panel["timeFrom"] for panel in of_now} == {ENGINE["time"]["from"].removeprefix("now-")}
    assert [link["url"] for link in ENGINE["links"] if link["title"] == "Look ahead"] == [
        "/d/headroom?from=now-6h&to=now%2B6h"
    ]


@pytest.mark.parametrize("target", ["restart", "crash"])
def test_growth_starts_over_with_each_run(prometheus: Prometheus, target: str) -> None:
    (grown,) = ask_panel(prometheus, target, "Growth of the engine's memory, with load")

    assert max(float(value) for _, value in grown["values"]) < GIB


@pytest.mark.parametrize("target", ["restart", "crash", "asleep"])
def test_a_card_that_is_empty_for_want_of_an_engine_is_no_headroom(prometheus: Prometheus, target: str) -> None:
    (free,) = ask_panel(prometheus, target, HERO, "GPU {{gpu}}")

    assert max(float(value) for _, value in free["values"]) < 10 * GIB


@pytest.mark.parametrize(
    "title",
    ["Likely out of memory", "Out of memory at the earliest", "Free now", "Held by others", "Unreported"],
)
def test_where_no_sidecar_looks_nothing_is_known(prometheus: Prometheus, title: str) -> None:
    (panel,) = (panel for panel in panels(ENGINE) if panel["title"] == title)

    assert [ask_panel(prometheus, "sidecar down", title, panel_query.name) for panel_query in queries(panel)] == [
        []
    ] * len(queries(panel))
    assert panel["fieldConfig"]["defaults"]["noValue"] == NOTHING


def test_a_sleeping_engine_is_called_so(prometheus: Prometheus) -> None:
    assert {read_tile(prometheus, "asleep", title) for title in ("Situation", "Likely out of memory")} == {"asleep"}


def test_what_a_neighbour_holds_is_a_warning(prometheus: Prometheus) -> None:
    steps = next(panel for panel in panels(ENGINE) if panel["title"] == "Held by others")["fieldConfig"]["defaults"]
    colours = [step["color"] for step in steps["thresholds"]["steps"] if (step["value"] or 0) <= 2 * GIB]

    assert float(read_tile(prometheus, "neighbour", "Held by others")) > 2 * GIB
    assert colours[-1] == "orange"


def test_of_eight_gpus_the_one_that_leaks_stands_out(prometheus: Prometheus) -> None:
    lines = ask_panel(prometheus, "eight GPUs", HERO, "GPU {{gpu}}")
    first_gpus = {
        title: series(prometheus, "eight GPUs", title)["metric"]["gpu"]
        for title in ("Likely out of memory", "Out of memory at the earliest", "Free now")
    }
    rows = ask_panel(prometheus, "eight GPUs", "Each GPU, and when it will be full", "D")

    assert {line["metric"]["gpu"] for line in lines} == {str(gpu) for gpu in range(8)}
    assert set(first_gpus.values()) == {str(LEAKING)}
    assert [row["metric"]["gpu"] for row in rows] == [str(LEAKING)]


def series(prometheus: Prometheus, target: str, title: str) -> dict[str, Any]:
    first_series: dict[str, Any] = ask_panel(prometheus, target, title)[0]
    return first_series


@pytest.mark.parametrize("address", ["https://wiki/{alert}", "https://git/{alert}.md", ""])
def test_an_alert_leads_to_its_runbook_where_the_address_is_known(prometheus: Prometheus, address: str) -> None:
    fleet = load("headroom-fleet")
    (table,) = (panel for panel in panels(fleet) if panel["title"] == "Firing alerts")
    address_query = f'label_replace(vector(1), "address", "{address}", "", "")' if address else "vector(1) > 1"
    expr = filled(queries(table)[0].expr, values(prometheus, fleet, {}))
    rows = [
        found_series["metric"]
        for found_series in prometheus.instant(expr.replace("headroom:runbooks:info", f"({address_query})"))
    ]

    assert {row["alertname"]: row.get("runbook", "") for row in rows} == {
        row["alertname"]: address.replace("{alert}", row["alertname"]) for row in rows
    }
    assert rows
