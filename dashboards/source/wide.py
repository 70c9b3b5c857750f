"""Panels as wide as the page, whose time axes lie one above the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from dashboards.source.grafana import Json
from dashboards.source.panels import state_timeline, timeseries

AXIS: Final = {"axisWidth": 190, "axisPlacement": "left"}
"""Enough for an alert's name. None has an axis on the right: a moment is at the same place in all of them."""


def lines(title: str, description: str, queries: Sequence[Json], *, height: int, **more: Any) -> Json:
    """Return lines over time."""
    custom = {**AXIS, **more.pop("custom", {})}
    return timeseries(title, description, queries, width=24, height=height, custom=custom, **more)


def states(title: str, description: str, queries: Sequence[Json], texts: Json, **more: Any) -> Json:
    """Return states over time."""
    return state_timeline(title, description, queries, [texts], custom=AXIS, **more)
