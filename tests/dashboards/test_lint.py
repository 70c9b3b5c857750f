"""Every check finds what it is for: a dashboard is broken on purpose, and that check says so, and where."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Final

import pytest

from tests.dashboards.checks import CHECKS
from tests.dashboards.grafana import Json, load, panels, variables

Break = Callable[[Json], object]

TITLE: Final = "Free now"
"""The panel that is broken."""

MARK: Final = load("headroom")["annotations"]["list"][0]["name"]


HERO: Final = "Headroom: free memory of each GPU"
RED_AND_GREEN: Final = ("#cc3311", "#6a7f00")
"""Alike to those who see neither."""


def panel(dashboard: Json, title: str) -> Json:
    return next(panel for panel in panels(dashboard) if panel["title"] == title)


def free_now(dashboard: Json) -> Json:
    return panel(dashboard, TITLE)


def coloured(colour: str) -> Json:
    matcher = {"id": "byName", "options": colour}
    return {"matcher": matcher, "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}]}


def variable(dashboard: Json, name: str) -> Json:
    return next(listed_variable for listed_variable in variables(dashboard) if listed_variable["name"] == name)


def asks(expr: str, legend: str = "") -> Break:
    return lambda dashboard: free_now(dashboard)["targets"][0].update(expr=expr, legendFormat=legend)


def has(*path: str | int, value: Any) -> Break:
    """Return what puts a value into that panel."""

    def put(dashboard: Json) -> None:
        place: Any = free_now(dashboard)
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value

    return put


def overrides(name: str, value: object) -> Break:
    override = {"matcher": {"id": "byName", "options": "a"}, "properties": [{"id": name, "value": value}]}
    return has("fieldConfig", "overrides", value=[override])


def tabulates(**organize: dict[str, Any]) -> Break:
    """Return what makes that panel a table."""

    def make(dashboard: Json) -> None:
        transformations = [{"id": "organize", "options": organize}]
        free_now(dashboard).update(type="table", options={}, transformations=transformations)

    return make


def collapses(dashboard: Json) -> None:
    dashboard["panels"][0]["collapsed"] = True


TARGET: Final = ",".join(f'{name}=~"${name}"' for name in ("cluster", "namespace", "job", "pod", "instance"))
GPU: Final = f'{TARGET},uuid=~"$uuid"'

BROKEN: Final[list[tuple[str, Break, str]]] = [
    ("importable", lambda board: board.update(id=7), "id"),
    ("importable", lambda board: board.update(uid=None), "uid"),
    ("importable", lambda board: board.update(editable=True), "editable"),
    ("importable", lambda board: board.update(__inputs=[]), "__inputs"),
    ("importable", lambda board: board.update(tags=[]), "tags"),
    ("one data source", lambda board: variable(board, "datasource").update(name="ds"), "variables"),
    ("one data source", has("targets", 0, "datasource", value={"type": "prometheus", "uid": "abc"}), "datasource"),
    ("one data source", lambda board: free_now(board)["targets"][0].pop("datasource"), TITLE),
    ("choosable", lambda board: variables(board).remove(variable(board, "instance")), "instance"),
    ("choosable", lambda board: variable(board, "pod").update(allValue=".+"), "pod"),
    ("choosable", lambda board: variable(board, "pod").update(multi=False), "pod"),
    ("explained", has("description", value=" "), TITLE),
    ("explained", lambda board: panels(board)[0].update(title=TITLE), TITLE),
    ("units", has("fieldConfig", "defaults", "unit", value=""), TITLE),
    ("units", has("fieldConfig", "defaults", "unit", value="byte"), TITLE),
    ("units", overrides("unit", "byte"), TITLE),
    ("identified", has("id", value=1), "id"),
    ("identified", lambda board: free_now(board)["targets"].append(free_now(board)["targets"][0]), TITLE),
    ("identified", has("targets", value=[]), TITLE),
    ("placed", has("gridPos", "x", value=22), TITLE),
    ("placed", has("gridPos", "w", value=24), TITLE),
    ("placed", has("gridPos", value={"x": 0, "y": 1, "w": 4, "h": 4}), "Situation"),
    ("placed", collapses, TITLE),
    ("colours", has("fieldConfig", "defaults", "color", value={"mode": "fixed", "fixedColor": "grey"}), "fixedColor"),
    ("linked", has("links", value=[{"url": "/d/headroon"}]), TITLE),
    ("linked", has("links", value=[{"url": "/d/headroom?var-gpus=1"}]), TITLE),
    ("valid", asks("sum(headroom_gpu_up"), TITLE),
    ("valid", asks('headroom_gpu_up{gpu="$gpus"}'), TITLE),
    ("known", asks("headroom_gpu_free_bytes"), TITLE),
    ("known", asks('headroom_gpu_up{device="0"}'), TITLE),
    ("known", asks('headroom_leak_state{state=~"growing|leaky"}'), TITLE),
    ("known", asks("sum by (model_name) (headroom_gpu_up)"), TITLE),
    ("known", asks("headroom_gpu_up * headroom_gpu_info"), TITLE),
    ("known", lambda board: variable(board, "pod")["query"].update(query='label_values(up{gpu="0"}, pod)'), "pod"),
    ("known", lambda board: board["annotations"]["list"][0].update(expr="ALARMS"), MARK),
    ("narrowed", asks(f"headroom_gpu_up{{{TARGET}}}"), TITLE),
    ("narrowed", asks(f"min_over_time(headroom_gpu_up{{{GPU.replace('=~', '=', 1)}}}[5m])"), TITLE),
    ("narrowed", lambda board: board["annotations"]["list"][0].update(expr="ALERTS"), MARK),
    ("rates", asks("sum(rate(headroom_engine_preemptions_total[5m]))"), TITLE),
    ("rates", asks("rate(headroom_engine_preemptions_total[$__range])"), TITLE),
    ("counters", asks("sum(headroom_engine_preemptions_total)"), TITLE),
    ("legends", asks("sum by (pod) (headroom_gpu_up)", "GPU {{gpu}}"), TITLE),
    ("legends", lambda board: board["annotations"]["list"][0].update(textFormat="{{device}}"), MARK),
    ("fresh", lambda board: panel(board, TITLE)["targets"][0].update(instant=False), TITLE),
    ("overrides", overrides("unit", "bytes"), TITLE),
    ("organized", tabulates(excludeByName={"Time": True, "Value": True}, renameByName={"devices": "GPU"}), TITLE),
    ("organized", tabulates(excludeByName={"Value": True}), TITLE),
    ("readable", has("interval", value="1s"), TITLE),
    ("readable", lambda board: panel(board, HERO)["options"]["legend"].update(calcs=[]), HERO),
    ("readable", lambda board: panel(board, HERO)["options"]["tooltip"].update(sort="none"), HERO),
    (
        "distinct",
        lambda board: panel(board, HERO)["fieldConfig"]["overrides"].extend(map(coloured, RED_AND_GREEN)),
        HERO,
    ),
    ("whole", asks(f"sum(headroom_gpu_memory_free_bytes{{{GPU}}})"), TITLE),
    ("admitted", has("fieldConfig", "defaults", "noValue", value=""), TITLE),
    ("admitted", lambda board: panel(board, HERO)["fieldConfig"]["defaults"].pop("noValue"), HERO),
    ("admitted", has("fieldConfig", "defaults", "mappings", value=[]), TITLE),
    (
        "single",
        lambda board: variable(board, "instance").update(query={"query": "label_values(up, instance)"}),
        "instance",
    ),
    ("schema", lambda board: board.update(graphToolTip=1), "$"),
    ("schema", lambda board: board.update(graphTooltip="1"), "$.graphTooltip"),
    ("schema of panels", has("options", "colourMode", value="value"), TITLE),
    ("schema of panels", has("options", "colorMode", value="values"), TITLE),
    ("schema of panels", overrides("decimal", 1), TITLE),
    ("schema of panels", overrides("decimals", "1"), TITLE),
    ("schema of panels", has("type", value="heatmap"), TITLE),
]


def test_a_fault_is_found_where_it_is(subtests: pytest.Subtests) -> None:
    for check, breaks, where in BROKEN:
        with subtests.test(check, where=where):
            dashboard = load("headroom")
            sound = list(CHECKS[check](deepcopy(dashboard)))

            breaks(dashboard)

            assert where in {fault.where for fault in CHECKS[check](dashboard) if fault not in sound}


def test_every_check_is_broken_once() -> None:
    assert {name for name, _, _ in BROKEN} == CHECKS.keys()
