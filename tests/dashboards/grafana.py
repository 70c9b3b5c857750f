"""A dashboard's JSON as Grafana reads it: its panels, its queries, and what represents the variables in them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

Json = dict[str, Any]

FOLDER: Final = Path(__file__).parents[2] / "dashboards"
NAMES: Final = tuple(sorted(path.stem for path in FOLDER.glob("*.json")))
"""The dashboards that are there."""

VARIABLE: Final = re.compile(r"\$\{(?P<braced>[A-Za-z_]\w*)(?::\w+)?\}|\$(?P<plain>[A-Za-z_]\w*)")
"""A variable in a text: $name, ${name} or ${name:format}."""

AUTO: Final = "__auto"
"""The legend that Grafana makes of a series's labels."""

SPECIAL: Final = re.compile(r"[$^*{}\[\]'+?.()|]")
"""What Grafana escapes, for the regular expression and for the quoted text that it is in."""

ALL: Final = "$__all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One query; `where` is its panel's title, or the name of its variable or annotation.

    `alone` is whether no other query of the panel has its legend.
    """

    where: str
    expr: str
    legend: str = ""
    ref: str = ""
    instant: bool = False
    alone: bool = True

    @property
    def name(self) -> str:
        """What distinguishes it from the panel's others: its legend, or its reference where that does not tell."""
        return self.legend if self.alone and self.legend not in {"", AUTO} else self.ref


def load(name: str) -> Json:
    """Return the dashboard of a file in dashboards/."""
    loaded: Json = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


def panels(dashboard: Json) -> list[Json]:
    """Return the panels, those in collapsed rows too, without the rows."""
    every = [shown_panel for panel in dashboard["panels"] for shown_panel in (panel, *panel.get("panels", ()))]
    return [panel for panel in every if panel["type"] != "row"]


def queries(panel: Json) -> list[Query]:
    """Return a panel's queries."""
    legends = Counter(target.get("legendFormat", "") for target in panel.get("targets", ()))
    return [
        Query(
            where=panel["title"],
            expr=target["expr"],
            legend=target.get("legendFormat", ""),
            ref=target["refId"],
            instant=target.get("instant", False),
            alone=legends[target.get("legendFormat", "")] == 1,
        )
        for target in panel.get("targets", ())
    ]


def variables(dashboard: Json) -> list[Json]:
    """Return the variables in their order."""
    listed: list[Json] = dashboard["templating"]["list"]
    return listed


def label_values(variable: Json) -> tuple[str, str]:
    """Return the series and the label of a variable that lists a label's values, or those of a query's answer."""
    if ranked := re.fullmatch(r"query_result\((.+)\)", variable["query"]["query"], re.DOTALL):
        assert re.search(rf'\b{variable["name"]}="\((\?<value>)?\[', variable["regex"])
        return ranked[1], variable["name"]
    match = re.fullmatch(r"label_values\((.+), *(\w+)\)", variable["query"]["query"], re.DOTALL)
    assert match, f"{variable['name']} is not label_values(series, label)"
    return match[1], match[2]


def is_ranked(variable: Json) -> bool:
    """Return whether a variable offers what a query answers, in its order: one is chosen, the first by itself."""
    return is_answer(variable) and not variable["includeAll"]


def is_answer(variable: Json) -> bool:
    """Return whether a variable offers what a query answers."""
    return variable["type"] == "query" and str(variable["query"]["query"]).startswith("query_result(")


def marked(dashboard: Json) -> list[Query]:
    """Return the annotations' queries; both their texts are the legend."""
    return [
        Query(
            where=annotation["name"],
            expr=annotation["expr"],
            legend=annotation["titleFormat"] + " " + annotation["textFormat"],
        )
        for annotation in dashboard["annotations"]["list"]
    ]


def every_query(dashboard: Json) -> Iterator[Query]:
    """Yield the queries of panels, variables and annotations."""
    for panel in panels(dashboard):
        yield from queries(panel)
    for variable in variables(dashboard):
        if variable["type"] == "query":
            yield Query(where=variable["name"], expr=label_values(variable)[0])
    yield from marked(dashboard)


def used(text: str) -> set[str]:
    """Return the names of the variables in a text."""
    return {match["braced"] or match["plain"] for match in VARIABLE.finditer(text)}


def filled(expr: str, values: Mapping[str, str]) -> str:
    """Return the expression with what represents each variable; one without a value fails."""
    return VARIABLE.sub(lambda match: values[match["braced"] or match["plain"]], expr)


def interpolated(variable: Json, chosen: Sequence[str], options: Sequence[str]) -> str:
    """Return what Grafana's Prometheus data source puts in for a variable with these values chosen."""
    if ALL in chosen:
        if "allValue" in variable:
            return str(variable["allValue"])
        chosen = options
    escaped = [SPECIAL.sub(r"\\\\\g<0>", chosen_value.replace("\\", 4 * "\\")) for chosen_value in chosen]
    return escaped[0] if len(escaped) == 1 else f"({'|'.join(escaped)})"
