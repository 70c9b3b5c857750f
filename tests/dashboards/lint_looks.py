"""What may be wrong with how a panel looks: what cannot be read, distinguished, or seen for the sum it is in."""

from __future__ import annotations

from itertools import combinations
from math import dist
from typing import Final

import promql_parser as promql

from dashboards.source.panels import NOTHING
from tests.assets.promql import labels, nodes, selectors
from tests.dashboards.grafana import Json, is_ranked, panels, queries, variables
from tests.dashboards.lint import Fault, Faults
from tests.dashboards.lint_queries import KNOWN, trees

NAMED: Final = {
    "blue": "#5794f2",
    "dark-green": "#37872d",
    "green": "#73bf69",
    "orange": "#ff9830",
    "red": "#f2495c",
    "text": "#ccccdc",
}
"""Grafana's names for the colours that series have, as its dark theme draws them."""

EYES: Final = {
    "most": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "deuteranopia": ((0.29275, 0.70725, 0.0), (0.29275, 0.70725, 0.0), (-0.02234, 0.02234, 1.0)),
    "protanopia": ((0.11238, 0.88762, 0.0), (0.11238, 0.88762, 0.0), (0.00401, -0.00401, 1.0)),
}
"""What becomes of linear red, green and blue, by Vienot, Brettel and Mollon (1999)."""

APART: Final = 10.0
"""Of CIE 1976: 2.3 is what can just be seen side by side; lines that cross want several times that."""


def readable(dashboard: Json) -> Faults:
    """Curves have their values in the legend and in a tooltip in their order; no query is finer than the scrapes."""
    for panel in panels(dashboard):
        if panel.get("interval") != "15s":
            yield Fault(where=panel["title"], problem="no least interval")
        if panel["type"] != "timeseries":
            continue
        legend, tooltip = panel["options"]["legend"], panel["options"]["tooltip"]
        if not legend["showLegend"] or legend["calcs"][-1:] != ["lastNotNull"]:
            yield Fault(where=panel["title"], problem="no values in the legend")
        if (tooltip["mode"], tooltip["sort"]) != ("multi", "desc"):
            yield Fault(where=panel["title"], problem="the tooltip is of one, or not sorted")


def distinct(dashboard: Json) -> Faults:
    """The colours that a panel gives its series are distinguished by people who see few colours, too."""
    for panel in panels(dashboard):
        if panel["type"] != "timeseries":
            continue
        for first_colour, second_colour in combinations(sorted(_given(panel)), 2):
            for eyes in EYES:
                if dist(_seen(first_colour, eyes), _seen(second_colour, eyes)) < APART:
                    yield Fault(
                        where=panel["title"], problem=f"{first_colour} and {second_colour} look alike to {eyes}"
                    )


def _given(panel: Json) -> set[str]:
    return {
        setting["value"]["fixedColor"]
        for override in panel["fieldConfig"]["overrides"]
        for setting in override["properties"]
        if setting["id"] == "color"
    }


def _seen(colour: str, eyes: str) -> tuple[float, ...]:
    """Return where a colour lies in CIE L*a*b* for such eyes."""
    digits = NAMED.get(colour, colour).lstrip("#")
    parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    red, green, blue = (sum(a * b for a, b in zip(row, linear, strict=True)) for row in EYES[eyes])
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    fx, fy, fz = (
        coordinate ** (1 / 3) if coordinate > 0.008856 else 7.787 * coordinate + 16 / 116 for coordinate in (x, y, z)
    )
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def whole(dashboard: Json) -> Faults:
    """Memory of several GPUs is never summed: the one that is nearly full would vanish among the others."""
    for query, expr in trees(query for panel in panels(dashboard) for query in queries(panel)):
        for node in nodes(expr):
            if isinstance(node, promql.AggregateExpr) and str(node.op) == "sum":
                summed_names = [
                    selector.name for selector in selectors(node) if "gpu" in KNOWN.get(selector.name or "", ())
                ]
                if summed_names and "gpu" not in (labels(node, KNOWN)[0] or ()):
                    yield Fault(where=query.where, problem=f"{summed_names[0]} is summed over GPUs")


def admitted(dashboard: Json) -> Faults:
    """An empty panel says why, a number in grey what is not known: the lowest value's colour would be a verdict."""
    for panel in panels(dashboard):
        defaults = panel["fieldConfig"]["defaults"]
        if not defaults.get("noValue"):
            yield Fault(where=panel["title"], problem="does not say why it is empty")
        if panel["type"] != "stat":
            continue
        special = [mapping["options"] for mapping in defaults["mappings"] if mapping["type"] == "special"]
        special_texts = [
            (mapping["match"], mapping["result"]["text"], mapping["result"]["color"]) for mapping in special
        ]
        colour = "#8e8e8e" if defaults.get("noValue") == NOTHING else "text"
        if special_texts != [("null+nan", defaults.get("noValue"), colour)]:
            yield Fault(where=panel["title"], problem=f"says {special_texts} where there is nothing")


def single(dashboard: Json) -> Faults:
    """A board of GPUs is of one engine, the worst unless another is chosen: many make one smear."""
    choices = {variable["name"]: variable for variable in variables(dashboard)}
    if "uuid" in choices and not is_ranked(choices["instance"]):
        yield Fault(where="instance", problem="many can be chosen")
