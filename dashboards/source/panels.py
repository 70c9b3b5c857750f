"""The kinds of panels: numbers, lines over time, states over time, tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from dashboards.source.colours import GPU_COLOURS, NEUTRAL, PALETTE, UNKNOWN_COLOUR
from dashboards.source.grafana import DATASOURCE, Json, coloured, override, steps

NOTHING: Final = "\u2013"
"""Shown, in grey, for a number that is not known; the situation says why."""


DURATION: Final = "dtdurations"
"""Grafana's unit for seconds that it writes in words."""

DURATION_DECIMALS: Final = 1
"""Grafana writes one unit more than this of a duration: without it, 3 h 51 min would be "3 hours"."""


LAST: Final = ("lastNotNull",)
"""The figure that a legend has in any case: the newest."""

LOWEST: Final = ("min", *LAST)
"""Of what must not run out."""

MEAN_AND_HIGHEST: Final = ("mean", "max", *LAST)
"""Of load: a mean alone hides the peak that a request met."""

METRIC: Final = re.compile(r"\b(?:[a-z_]+:)?(?:headroom|vllm|process|kube)[_:]\w+(?::\w+)*|\bALERTS\w*|\bup(?=\{)")
"""A metric or a recording rule in an expression."""


def named_metrics(queries: Sequence[Json]) -> str:
    """Return the sentence that names the metrics of a panel, in the order in which its queries have them."""
    names = dict.fromkeys(name for query in queries for name in METRIC.findall(query["expr"]))
    return "Metrics: " + ", ".join(f"`{name}`" for name in names) + "."


def _nothing(text: str) -> Json:
    """Return the mapping of no value at all: without one it has the colour of the lowest value."""
    colour = UNKNOWN_COLOUR if text == NOTHING else NEUTRAL
    return {
        "type": "special",
        "options": {"match": "null+nan", "result": {"text": text, "color": colour, "index": 9}},
    }


def panel(
    kind: str,
    title: str,
    description: str,
    queries: Sequence[Json],
    *,
    unit: str,
    width: int,
    height: int,
    options: Json,
    custom: Json | None = None,
    overrides: Sequence[Json] = (),
    **defaults: Any,
) -> Json:
    """Return a panel without id and place, which `dashboard` gives it; `defaults` go into the field configuration.

    Where there is nothing to show it says so, and where to look for the cause.
    """
    defaults.setdefault("noValue", "not known: see which sources answer")
    defaults.setdefault("color", PALETTE)
    defaults.setdefault("thresholds", steps((None, NEUTRAL)))
    defaults.setdefault("mappings", [])
    if unit == DURATION:
        defaults.setdefault("decimals", DURATION_DECIMALS)
    return {
        "type": kind,
        "title": title,
        "description": f"{description}\n\n{named_metrics(queries)}",
        "datasource": DATASOURCE,
        "interval": "15s",
        "gridPos": {"w": width, "h": height},
        "fieldConfig": {"defaults": {**defaults, "unit": unit, "custom": custom or {}}, "overrides": list(overrides)},
        "options": options,
        "targets": [{**each, "refId": each["refId"] or "ABCDEFGHIJKL"[place]} for place, each in enumerate(queries)],
    }


def stat(
    title: str,
    description: str,
    queries: Sequence[Json],
    *,
    unit: str,
    width: int = 4,
    height: int = 5,
    text: Json | None = None,
    named: bool = False,
    background: bool = False,
    **more: Any,
) -> Json:
    """Return large numbers, of now: the last value of a range would be shown long after it was gone.

    `text` sets the sizes, and puts one below the other; `named` writes the name of the series beside the number.
    With `background` the tile has the colour. What is unknown is grey.
    """
    options = {
        "colorMode": "background" if background else "value",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "horizontal" if text else "auto",
        "percentChangeColorMode": "standard",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "showPercentChange": False,
        "textMode": "value_and_name" if named else "auto",
        "wideLayout": not (text or named),
        # Among many series Grafana would shrink their names to 9 pixels.
        **({"text": text or {"titleSize": 14}} if text or named else {}),
    }
    more.setdefault("color", {"mode": "thresholds"})
    more["mappings"] = [*more.get("mappings", ()), _nothing(more["noValue"])]
    now = [{**query, "instant": True, "range": False} for query in queries]
    return panel("stat", title, description, now, unit=unit, width=width, height=height, options=options, **more)


def timeseries(
    title: str,
    description: str,
    queries: Sequence[Json],
    *,
    unit: str,
    width: int = 12,
    height: int = 8,
    stacked: bool = False,
    bars: bool = False,
    figures: Sequence[str] = LAST,
    custom: Json | None = None,
    **more: Any,
) -> Json:
    """Return lines over time, a gap where nothing was known; `stacked` areas end at their sum.

    The legend has the `figures` of each line.

    What is of a GPU or a rank of the engine's, by the name of its series, has that one's colour everywhere; the MIG
    instances of a card have one each from the palette.
    """
    numbered = [head for head in ("GPU", "engine") if any(f"{head} {{{{" in query["legendFormat"] for query in queries)]
    more["overrides"] = [
        *(coloured(f"/\\b{head} {n}\\b(?! MIG)/", colour) for head in numbered for n, colour in enumerate(GPU_COLOURS)),
        *more.get("overrides", ()),
    ]
    drawn = {
        "drawStyle": "bars" if bars else "line",
        "lineInterpolation": "linear",
        "lineWidth": 0 if stacked else 2,
        "fillOpacity": 80 if stacked or bars else 0,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
        "axisPlacement": "auto",
        **(custom or {}),
    }
    options = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": list(figures)},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return panel(
        "timeseries",
        title,
        description,
        queries,
        unit=unit,
        width=width,
        height=height,
        options=options,
        custom=drawn,
        **more,
    )


def state_timeline(
    title: str,
    description: str,
    queries: Sequence[Json],
    mappings: Sequence[Json],
    *,
    width: int = 24,
    height: int = 4,
    custom: Json | None = None,
    **more: Any,
) -> Json:
    """Return coloured bars over time, one for each series."""
    options = {
        "alignValue": "left",
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False},
        "mergeValues": True,
        "rowHeight": 0.8,
        "showValue": "auto",
        "tooltip": {"mode": "single", "sort": "none"},
    }
    more.setdefault("color", {"mode": "thresholds"})
    return panel(
        "state-timeline",
        title,
        description,
        queries,
        unit="short",
        width=width,
        height=height,
        options=options,
        custom={"fillOpacity": 80, "lineWidth": 0, **(custom or {})},
        mappings=list(mappings),
        **more,
    )


def table(
    title: str,
    description: str,
    queries: Sequence[Json],
    transformations: Sequence[Json],
    *,
    width: int = 24,
    height: int = 8,
    **more: Any,
) -> Json:
    """Return a table of now; the transformations join and sort its queries.

    A cell that has nothing is empty: why the whole table is, is said where it has no line.
    """
    more["overrides"] = [override("/./", noValue=""), *more.get("overrides", ())]
    made = panel(
        "table",
        title,
        description,
        [{**query, "format": "table", "instant": True, "range": False} for query in queries],
        unit="short",
        width=width,
        height=height,
        options={"cellHeight": "sm", "frameIndex": 0, "showHeader": True},
        custom={"align": "auto", "cellOptions": {"type": "auto"}},
        **more,
    )
    return {**made, "transformations": list(transformations)}
