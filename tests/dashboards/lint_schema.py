"""What Grafana's own types report about a dashboard (tests/assets/grafana/README.md: where they are from)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from jsonschema import Draft7Validator
from jsonschema.exceptions import ValidationError, best_match

from tests.dashboards.grafana import Json, panels
from tests.dashboards.lint import ASSETS, Fault, Faults

DASHBOARD: Final[Json] = json.loads((ASSETS / "dashboard.schema.json").read_text(encoding="utf-8"))
PANELS: Final[Json] = json.loads((ASSETS / "panels.schema.json").read_text(encoding="utf-8"))

MORE: Final[Mapping[str, frozenset[str]]] = {
    "annotations": frozenset({"expr", "step", "titleFormat", "textFormat", "useValueForTime"}),
    "templating": frozenset({"definition"}),
    "state-timeline": frozenset({"spanNulls"}),
}
"""What Grafana reads and its schema does not have: its data sources and its panels' code know of more."""


def dashboard_schema(dashboard: Json) -> Faults:
    """Everything outside of panels' own options is as Grafana writes it."""
    document = json.loads(json.dumps(dashboard))
    for part in ("annotations", "templating"):
        document[part]["list"] = [_without(element, MORE[part]) for element in document[part]["list"]]
    for variable in document["templating"]["list"]:
        if variable["current"] == {}:  # nothing chosen yet: Grafana takes the default data source
            del variable["current"]
    for error in Draft7Validator(DASHBOARD).iter_errors(document):
        yield Fault(where=error.json_path, problem=_told(error))


def panels_schema(dashboard: Json) -> Faults:
    """A panel's options, and what only its fields have, are those of its kind."""
    for panel in panels(dashboard):
        if panel["type"] not in PANELS:
            yield Fault(where=panel["title"], problem=f"no schema of {panel['type']} was kept")
            continue
        config = panel["fieldConfig"]
        drawn = config["defaults"].get("custom", {})
        yield from _panel(panel, {"options": panel["options"], "custom": drawn})
        for override in config["overrides"]:
            for setting in override["properties"]:
                yield from _property(panel, setting["id"], setting["value"])


def _property(panel: Json, name: str, value: Any) -> Faults:
    if name.startswith("custom."):
        yield from _panel(panel, {"custom": {name.removeprefix("custom."): value}})
        return
    fields = {"$ref": "#/definitions/FieldConfig", "definitions": DASHBOARD["definitions"]}
    for error in Draft7Validator(fields).iter_errors({name: value}):
        yield Fault(where=panel["title"], problem=_told(error))


def _panel(panel: Json, configured: Json) -> Faults:
    """Yield what a kind's schema says; an option that is left out has Grafana's default."""
    if not configured.get("custom"):
        configured.pop("custom", None)
    else:
        configured = {**configured, "custom": _without(configured["custom"], MORE.get(panel["type"], frozenset()))}
    for error in Draft7Validator(PANELS[panel["type"]]).iter_errors(configured):
        if error.validator != "required":
            yield Fault(where=panel["title"], problem=_told(error))


def _without(value: Json, keys: Iterable[str]) -> Json:
    return {key: field_value for key, field_value in value.items() if key not in set(keys)}


def _told(error: ValidationError) -> str:
    inner = best_match([error]) or error
    return f"{inner.json_path}: {inner.message[:200]}"
