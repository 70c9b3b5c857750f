"""What may be wrong with the names that series get, and with what is hung on those names."""

from __future__ import annotations

import re
from itertools import product
from typing import Final

from tests.assets.promql import CLOSED, labels
from tests.dashboards.grafana import AUTO, Json, marked, panels, queries
from tests.dashboards.lint import Fault, Faults
from tests.dashboards.lint_queries import KNOWN, trees

ANY: Final = "\0"
"""Represents the value of a label that can have any."""

LABEL: Final = re.compile(r"\{\{ *(\w+) *\}\}")


def legends(dashboard: Json) -> Faults:
    """A legend, and the text of an annotation, names labels that the query keeps."""
    panel_queries = [query for panel in panels(dashboard) for query in queries(panel)]
    for query, expr in trees(panel_queries + marked(dashboard)):
        for name in sorted(set(LABEL.findall(query.legend)) - (labels(expr, KNOWN)[0] or frozenset())):
            yield Fault(where=query.where, problem=f"its text has {name}, its result has not")


def overrides(dashboard: Json) -> Faults:
    """An override by name is of a series that there can be, or of a column: the tables may share their overrides."""
    all_columns = {column for table in tables(dashboard) for column in columns(table)}
    for panel in panels(dashboard):
        names = all_columns if panel["type"] == "table" else named(panel)
        for override in panel["fieldConfig"]["overrides"]:
            kind, wanted = override["matcher"]["id"], override["matcher"]["options"]
            if kind == "byName" and not any(re.fullmatch(_pattern(name), wanted) for name in names):
                yield Fault(where=panel["title"], problem=f"nothing is called {wanted}")
            if kind == "byRegexp" and not any(re.search(wanted.strip("/"), name) for name in _filled(names)):
                yield Fault(where=panel["title"], problem=f"nothing is called like {wanted}")


def named(panel: Json) -> set[str]:
    """Return the names that series can have, with ANY for the value of a label whose values are no closed set."""
    names: set[str] = set()
    for query in queries(panel):
        if query.legend != AUTO:
            parts = enumerate(LABEL.split(query.legend))
            choices = [sorted(CLOSED.get(part, ANY)) if place % 2 else [part] for place, part in parts]
            names |= {"".join(chosen) for chosen in product(*choices)}
    return names


def _filled(names: set[str]) -> set[str]:
    """Return the names with a digit for a label that can have any value: it may be the number of a GPU."""
    return {name.replace(ANY, str(digit)) for name in names for digit in range(10)}


def _pattern(name: str) -> str:
    return re.escape(name).replace(ANY, ".+")


def tables(dashboard: Json) -> list[Json]:
    """Return the panels that are tables."""
    return [panel for panel in panels(dashboard) if panel["type"] == "table"]


def columns(table: Json) -> set[str]:
    """Return the names of a table's columns, after its transformations."""
    names = asked(table)
    for organizer in organizers(table):
        excluded = {name for name, out in organizer.get("excludeByName", {}).items() if out}
        names = {organizer.get("renameByName", {}).get(name) or name for name in names - excluded}
    return names


def asked(table: Json) -> set[str]:
    """Return the names of the columns that a table's queries give."""
    refs = [query.ref for query in queries(table)]
    names = {"Time", *(["Value"] if len(refs) == 1 else [f"Value #{ref}" for ref in refs])}
    return names.union(*(labels(expr, KNOWN)[0] or () for _, expr in trees(queries(table))))


def organizers(table: Json) -> list[Json]:
    """Return the options of a table's transformations that hide, rename and order columns."""
    return [
        transformation["options"]
        for transformation in table.get("transformations", ())
        if transformation["id"] == "organize"
    ]


def organized(dashboard: Json) -> Faults:
    """A table hides, renames and orders columns that a table has; none is left with a name of Grafana's."""
    there = {column for table in tables(dashboard) for column in asked(table)}
    for table in tables(dashboard):
        named_here = {
            name
            for organizer in organizers(table)
            for part in ("excludeByName", "renameByName", "indexByName")
            for name in organizer.get(part, {})
        }
        for name in sorted(named_here - there):
            yield Fault(where=table["title"], problem=f"there is no column {name}")
        for name in sorted(columns(table)):
            if name.startswith(("Time", "Value")):
                yield Fault(where=table["title"], problem=f"a column is called {name}")
