"""What may be wrong with a dashboard's shape: import, variables, panels, places, colours and links."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Final

from dashboards.source.around import CELL
from tests.dashboards.grafana import NAMES, Json, is_ranked, load, panels, variables

ASSETS: Final = Path(__file__).parents[1] / "assets" / "grafana"
UNITS: Final = frozenset(json.loads((ASSETS / "units.json").read_text(encoding="utf-8")))
COLUMNS: Final = 24
DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}

SHADES: Final = ("", "super-light-", "light-", "semi-dark-", "dark-")
HUES: Final = ("red", "orange", "yellow", "green", "blue", "purple")
COLOUR: Final = re.compile(rf"({'|'.join(SHADES)})({'|'.join(HUES)})|text|transparent|#[0-9a-f]{{6}}")
"""A name that a theme of Grafana's knows, or a colour by its numbers."""


HIDDEN: Final = 2
"""What makes a variable one that nobody chooses: it follows from the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is wrong; `where` is a panel's title, or the name of a variable or annotation."""

    where: str
    problem: str


Faults = Iterator[Fault]


def every(value: Any, key: str) -> Iterator[Any]:
    """Yield what stands under `key`, at any depth."""
    if isinstance(value, dict):
        if key in value:
            yield value[key]
        value = list(value.values())
    if isinstance(value, list):
        for member in value:
            yield from every(member, key)


def importable(dashboard: Json) -> Faults:
    """A file can be imported, provisioned and mounted as it is: `__inputs` works for the first alone."""
    for key in ("__inputs", "__requires", "__elements"):
        if key in dashboard:
            yield Fault(where=key, problem="not substituted when provisioned")
    for key, wanted in {"id": None, "editable": False, "schemaVersion": 39}.items():
        if dashboard.get(key, "") != wanted:
            yield Fault(where=key, problem=f"is not {wanted}")
    if not re.fullmatch(r"[a-z-]{1,40}", dashboard.get("uid") or ""):
        yield Fault(where="uid", problem="a link needs one that is fixed")
    if "vllm-headroom" not in dashboard["tags"]:
        yield Fault(where="tags", problem="the links between the dashboards go by the tag")


def one_data_source(dashboard: Json) -> Faults:
    """The data source is chosen once, at the top."""
    sources = [variable for variable in variables(dashboard) if variable["type"] == "datasource"]
    source_fields = [(source["name"], source["label"], source["query"]) for source in sources]
    if source_fields != [("datasource", "Data source", "prometheus")]:
        yield Fault(where="variables", problem=f"the data sources are {source_fields}")
    for data_source in every(dashboard, "datasource"):
        if data_source != DATASOURCE:
            yield Fault(where="datasource", problem=f"is {data_source}")
    for panel in panels(dashboard):
        for target in (panel, *panel.get("targets", ())):
            if "datasource" not in target:
                yield Fault(where=panel["title"], problem="has no data source")


def choosable(dashboard: Json) -> Faults:
    """Job and instance can be chosen, and every choice can be several or All, labels that do not exist included.

    Of those that a query ranks one is chosen.
    """
    asked_variables = [variable for variable in variables(dashboard) if variable["type"] != "datasource"]
    for missing in {"job", "instance"} - {listed_variable["name"] for listed_variable in asked_variables}:
        yield Fault(where=missing, problem="cannot be chosen")
    for asked_variable in asked_variables:
        wanted: Json = {"type": "query", "multi": True, "includeAll": True, "allValue": ".*", "refresh": 2}
        if asked_variable["type"] == "custom":
            wanted = {"multi": True, "includeAll": True, "allValue": ".*"}
        if asked_variable.get("hide") == HIDDEN:
            wanted = {"type": "query", "multi": True, "includeAll": False, "refresh": 2}
        if is_ranked(asked_variable):
            wanted = {"type": "query", "multi": False, "includeAll": False, "refresh": 2, "sort": 0}
        for key, value in wanted.items():
            if asked_variable.get(key) != value:
                yield Fault(where=asked_variable["name"], problem=f"{key} is not {value}")


def explained(dashboard: Json) -> Faults:
    """A panel says what it is and what its numbers mean, and no two are called the same."""
    for panel in panels(dashboard):
        for key in ("title", "description"):
            if not panel.get(key, "").strip():
                yield Fault(where=panel.get("title", ""), problem=f"no {key}")
    for title, count in Counter(panel.get("title") for panel in panels(dashboard)).items():
        if count > 1:
            yield Fault(where=title or "", problem=f"{count} panels have this title")


def units(dashboard: Json) -> Faults:
    """A number has a unit, and one that Grafana knows."""
    for panel in panels(dashboard):
        config = panel.get("fieldConfig", {"defaults": {}, "overrides": []})
        properties = [setting for override in config["overrides"] for setting in override["properties"]]
        changed = [field_property["value"] for field_property in properties if field_property["id"] == "unit"]
        for unit in (config["defaults"].get("unit", ""), *changed):
            if unit not in UNITS and not unit.startswith("time:"):
                yield Fault(where=panel["title"], problem=f'"{unit}" is no unit')


def identified(dashboard: Json) -> Faults:
    """Ids and references are there once."""
    rows = [panel for panel in dashboard["panels"] if panel["type"] == "row"]
    for number, count in Counter(panel["id"] for panel in (*rows, *panels(dashboard))).items():
        if count > 1:
            yield Fault(where="id", problem=f"{count} panels are number {number}")
    for panel in panels(dashboard):
        refs = [target["refId"] for target in panel.get("targets", ())]
        if not refs or len(refs) != len(set(refs)):
            yield Fault(where=panel["title"], problem=f"the queries are {refs}")


def placed(dashboard: Json) -> Faults:
    """Panels lie side by side on 24 columns, and those of a collapsed row inside it."""
    row: Json = {"collapsed": True}
    for panel in dashboard["panels"]:
        if panel["type"] != "row" and row["collapsed"]:
            yield Fault(where=panel["title"], problem="not in an open row")
        if panel["type"] == "row":
            row = panel
            if row["collapsed"] != bool(row["panels"]):
                yield Fault(where=row["title"], problem="a collapsed row has its panels inside, an open one after it")
    groups = [dashboard["panels"], *(panel["panels"] for panel in dashboard["panels"] if panel["type"] == "row")]
    for group in groups:
        yield from _apart(group)


def _apart(group: list[Json]) -> Faults:
    for panel in group:
        place = panel["gridPos"]
        if place["x"] < 0 or place["w"] < 1 or place["h"] < 1 or place["x"] + place["w"] > COLUMNS:
            yield Fault(where=panel["title"], problem="out of the page")
    for first_panel, second_panel in combinations(group, 2):
        a, b = first_panel["gridPos"], second_panel["gridPos"]
        is_beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        if not (is_beside or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]):
            yield Fault(where=first_panel["title"], problem=f"overlaps {second_panel['title']}")


def colours(dashboard: Json) -> Faults:
    """A colour is one that Grafana can draw."""
    for key in ("color", "fixedColor", "iconColor"):
        for colour in every(dashboard, key):
            if isinstance(colour, str) and not COLOUR.fullmatch(colour):
                yield Fault(where=key, problem=f"{colour} is no colour")


def linked(dashboard: Json) -> Faults:
    """A link to a dashboard goes to one of these, and sets variables it has: in its address, or in a query's label."""
    there = {board["uid"]: {variable["name"] for variable in variables(board)} for board in map(load, NAMES)}
    for panel in panels(dashboard):
        labels = "".join(target["expr"] for target in panel.get("targets", ()) if "var-" in target["expr"])
        for uid, address in re.findall(r'"/d/([\w-]+)([^"]*)"', json.dumps(panel)):
            if uid not in there:
                yield Fault(where=panel["title"], problem=f"there is no dashboard {uid}")
            by_label = labels if CELL in address else ""
            for name in set(re.findall(r"var-(\w+)=", address + by_label)) - there.get(uid, set()):
                yield Fault(where=panel["title"], problem=f"{uid} has no variable {name}")
