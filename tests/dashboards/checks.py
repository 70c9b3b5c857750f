"""Every check of a dashboard's JSON, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from tests.dashboards import lint, lint_looks, lint_names, lint_queries, lint_schema
from tests.dashboards.grafana import Json
from tests.dashboards.lint import Faults

CHECKS: Final[Mapping[str, Callable[[Json], Faults]]] = {
    "importable": lint.importable,
    "one data source": lint.one_data_source,
    "choosable": lint.choosable,
    "explained": lint.explained,
    "units": lint.units,
    "identified": lint.identified,
    "placed": lint.placed,
    "colours": lint.colours,
    "linked": lint.linked,
    "valid": lint_queries.valid,
    "known": lint_queries.known,
    "narrowed": lint_queries.narrowed,
    "rates": lint_queries.rates,
    "counters": lint_queries.counters,
    "fresh": lint_queries.fresh,
    "legends": lint_names.legends,
    "overrides": lint_names.overrides,
    "organized": lint_names.organized,
    "readable": lint_looks.readable,
    "distinct": lint_looks.distinct,
    "whole": lint_looks.whole,
    "admitted": lint_looks.admitted,
    "single": lint_looks.single,
    "schema": lint_schema.dashboard_schema,
    "schema of panels": lint_schema.panels_schema,
}
