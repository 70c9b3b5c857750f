"""A whole dashboard: rows of panels in their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dashboards.source.around import TAG, links, page_of_the_sidecar, variables
from dashboards.source.grafana import Json

SCHEMA_VERSION: Final = 39  # Grafana 10.4 to 13 import it as it is
COLUMNS: Final = 24
VERSION: Final = 2
"""Raised with each release that changes a board, so that a provisioned one shows which it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A titled row of panels, in reading order; a collapsed one is opened by a click."""

    title: str
    panels: Sequence[Json | list[Json]]
    collapsed: bool = False


def dashboard(
    *,
    uid: str,
    title: str,
    description: str,
    since: str,
    refresh: str,
    rows: Sequence[Row],
    marks: Sequence[Json],
    one_engine: bool,
    looks_ahead: bool = False,
) -> Json:
    """Return the dashboard's JSON; panels run left to right and wrap at 24 columns.

    A list among a row's panels is a column: its panels lie below each other.
    Where it `looks_ahead` its time may end in the future; numbers are of now even then.
    """
    return {
        "id": None,
        "version": VERSION,
        "uid": uid,
        "title": title,
        "description": description,
        "tags": [TAG],
        "schemaVersion": SCHEMA_VERSION,
        "editable": False,
        "graphTooltip": 1,
        "refresh": refresh,
        "time": {"from": since, "to": "now"},
        "timezone": "browser",
        "templating": {"list": variables(gpu=one_engine)},
        "annotations": {"list": list(marks)},
        "links": [*(links(uid, since) if looks_ahead else links()), *([page_of_the_sidecar()] if one_engine else [])],
        "panels": _of_now(_placed(rows), since) if looks_ahead else _placed(rows),
    }


def _of_now(placed: list[Json], since: str) -> list[Json]:
    """Return the panels, those of now with a separate time range: Grafana heeds it unless the page's is fixed."""
    for panel in (
        each for row in placed for each in (row, *row.get("panels", ())) if each["type"] in {"stat", "table"}
    ):
        panel |= {"timeFrom": since.removeprefix("now-"), "hideTimeOverride": True}
    return placed


def _placed(rows: Sequence[Row]) -> list[Json]:
    placed: list[Json] = []
    top, number = 0, 0
    for row in rows:
        number += 1
        head = {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": row.collapsed,
            "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": top},
            "panels": [],
        }
        panels, bottom = _flow(row.panels, top + 1, number)
        number += len(panels)
        if row.collapsed:
            placed.append({**head, "panels": panels})
            top += 1
        else:
            placed += [head, *panels]
            top = bottom
    return placed


def _flow(panels: Sequence[Json | list[Json]], top: int, number: int) -> tuple[list[Json], int]:
    """Return the panels with ids after `number`, side by side until a line is full, and where the last line ends."""
    flowed: list[Json] = []
    left, line = 0, 0
    for part in panels:
        column = part if isinstance(part, list) else [part]
        width = max(panel["gridPos"]["w"] for panel in column)
        if left + width > COLUMNS:
            top, left, line = top + line, 0, 0
        height = 0
        for panel in column:
            number += 1
            place = {"h": panel["gridPos"]["h"], "w": panel["gridPos"]["w"], "x": left, "y": top + height}
            flowed.append({"id": number, **panel, "gridPos": place})
            height += place["h"]
        left, line = left + width, max(line, height)
    return flowed, top + line
