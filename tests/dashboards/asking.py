"""Asks a Prometheus what Grafana would: variables filled in, one query after the other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from tests.dashboards.grafana import (
    ALL,
    Json,
    Query,
    filled,
    interpolated,
    is_answer,
    is_ranked,
    label_values,
    variables,
)
from tests.dashboards.store import HOURS, SCRAPE_SECONDS, Prometheus

STEP_SECONDS: Final = SCRAPE_SECONDS
BUILT_IN: Final = {
    "__interval": f"{STEP_SECONDS}s",
    "__rate_interval": f"{4 * SCRAPE_SECONDS}s",
    "__range": f"{HOURS * 3600:.0f}s",
}
"""What Grafana makes of a panel some 300 pixels wide and of a scrape interval of 30 s."""


def options(prometheus: Prometheus, dashboard: Json, chosen: Mapping[str, str]) -> dict[str, list[str]]:
    """Return what each variable offers, where `chosen` is chosen and All of the others."""
    return _variables(prometheus, dashboard, chosen)[0]


def values(prometheus: Prometheus, dashboard: Json, chosen: Mapping[str, str]) -> dict[str, str]:
    """Return what represents each variable in a query."""
    return _variables(prometheus, dashboard, chosen)[1]


def _variables(
    prometheus: Prometheus, dashboard: Json, chosen: Mapping[str, str]
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return both, with copies of what was found before for the same choice: most tests have it in common."""
    key = (dashboard["uid"], tuple(sorted(chosen.items())))
    if key not in prometheus.chosen:
        prometheus.chosen[key] = _query_variables(prometheus, dashboard, chosen)
    offered, put_in = prometheus.chosen[key]
    return dict(offered), dict(put_in)


def _query_variables(
    prometheus: Prometheus, dashboard: Json, chosen: Mapping[str, str]
) -> tuple[dict[str, list[str]], dict[str, str]]:
    offered: dict[str, list[str]] = {}
    put_in = dict(BUILT_IN)
    for variable in variables(dashboard):
        if variable["type"] == "query":
            name, (series, label) = variable["name"], label_values(variable)
            if is_answer(variable):
                offered[name] = [
                    found_series["metric"][label] for found_series in prometheus.instant(filled(series, put_in))
                ]
            else:
                offered[name] = prometheus.label_values(filled(series, put_in), label)
            if variable["regex"].startswith("/^"):
                offered[name] = re.findall(variable["regex"].strip("/"), "\n".join(offered[name]), re.MULTILINE)
            first_value = offered[name][0] if is_ranked(variable) else ALL
            assert chosen.get(name) in {None, *offered[name]}, f"{name} offers {offered[name]}"
            put_in[name] = interpolated(variable, [chosen.get(name, first_value)], offered[name])
        if variable["type"] == "custom":
            put_in[variable["name"]] = interpolated(variable, [chosen.get(variable["name"], ALL)], [])
    return offered, put_in


def answer(prometheus: Prometheus, query: Query, put_in: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the series that a panel gets, without those that have no number."""
    expr = filled(query.expr, put_in)
    series = prometheus.instant(expr) if query.instant else prometheus.over_time(expr, STEP_SECONDS)
    return [a_series for a_series in series if any(value != "NaN" for _, value in a_series["values"])]
