"""The pieces of a Grafana panel, as the classic JSON that Grafana 10.4 and newer import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

Json = dict[str, Any]

DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


MINUTE: Final = "time:MMM D HH:mm"
"""The unit of a moment, such as Nov 23 04:08; what is expected, or looked for by the minute, has no seconds."""

LEGEND: Final = {"legend": True, "tooltip": False, "viz": False}
"""Hides from the legend what the tooltip shows: eight GPUs would fill the panel with names."""


def query(expr: str, legend: str = "", *, instant: bool = False, table: bool = False, ref: str = "") -> Json:
    """Return one PromQL query; `panel` names those without a `ref` A, B, C ..."""
    return {
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": expr,
        "format": "table" if table else "time_series",
        "instant": instant,
        "legendFormat": legend or "__auto",
        "range": not instant,
        "refId": ref,
    }


def steps(*changes: tuple[float | None, str]) -> Json:
    """Return thresholds: each colour holds from its value on; the first value is None."""
    return {"mode": "absolute", "steps": [{"color": colour, "value": value} for value, colour in changes]}


def override(name: str, /, **properties: Any) -> Json:
    """Return an override of the series called `name`, a regular expression when it is between slashes.

    A property's `__` is a dot.
    """
    matcher = "byRegexp" if name.startswith("/") else "byName"
    return {
        "matcher": {"id": matcher, "options": name},
        "properties": [{"id": key.replace("__", "."), "value": value} for key, value in properties.items()],
    }


def coloured(name: str, colour: str, /, **properties: Any) -> Json:
    """Return an override that always draws the series called `name` in this colour."""
    return override(name, color={"mode": "fixed", "fixedColor": colour}, **properties)


def in_turn(colours: Sequence[str]) -> list[Json]:
    """Return the overrides that draw the first query's series in the first colour, the second's in the second."""
    return [
        {
            "matcher": {"id": "byFrameRefID", "options": "ABCDEFGHIJKL"[place]},
            "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}],
        }
        for place, colour in enumerate(colours)
    ]


def on_the_right(name: str, colour: str) -> Json:
    """Return an override that draws a series as a thin line against the right axis, from 0 to 1 or further."""
    return coloured(
        name,
        colour,
        unit="short",
        custom__axisPlacement="right",
        custom__axisLabel=name,
        custom__axisSoftMin=0,
        custom__axisSoftMax=1,
        custom__fillOpacity=0,
        custom__lineWidth=1,
        custom__stacking={"mode": "none", "group": "A"},
    )


def values(*texts: tuple[float | str, str, str]) -> Json:
    """Return a mapping of values to a text and a colour."""
    options = {
        value if isinstance(value, str) else f"{value:g}": {"text": text, "color": colour, "index": index}
        for index, (value, text, colour) in enumerate(texts)
    }
    return {"type": "value", "options": options}
