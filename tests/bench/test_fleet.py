"""How long a look at the fleet's dashboard takes with 1,000 sidecars of eight GPUs, after the rules."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.bench.fleet import SIDECARS, fleet
from tests.bench.processes import cpu_seconds
from tests.bench.results import Results
from tests.dashboards.grafana import Query, every_query, filled, load, panels, queries, variables
from tests.dashboards.store import Prometheus, missing

pytestmark = pytest.mark.bench

DASHBOARD = load("headroom-fleet")
SIX_HOURS = 6 * 3600
ALL = {variable["name"]: ".*" for variable in variables(DASHBOARD)} | {"__rate_interval": "4m", "__range": "6h"}


def test_a_look_at_the_fleet(tmp_path: Path, results: Results) -> None:
    if absent := missing():
        pytest.skip(f"not on the PATH: {absent} (Debian: prometheus)")
    with fleet(tmp_path) as prometheus:
        looks = [_look(prometheus) for _ in range(3)]

    took, cpu = (min(figures) for figures in zip(*looks, strict=True))
    title = f"every query of the fleet's dashboard, {SIDECARS} sidecars of 8 GPUs"
    results.at_most(1, f"CPU of {title}", cpu, " s")
    results.note(f"{title}, one after the other", f"{took:.3g} s")


def _look(prometheus: Prometheus) -> tuple[float, float]:
    """Return how long it takes to ask everything once, one query after the other, and the CPU that Prometheus takes."""
    now, began, cpu = time.time(), time.monotonic(), cpu_seconds(prometheus.pid)
    shown = [query for panel in panels(DASHBOARD) for query in queries(panel)]
    answers = [_ask(prometheus, query, now) for query in shown]
    for query in every_query(DASHBOARD):
        if query.where in ALL:
            form = {"match[]": filled(query.expr, ALL), "start": str(now - SIX_HOURS), "end": str(now)}
            prometheus.ask("series", **form)
    assert sum(map(bool, answers)) > len(answers) / 2, "there is nothing to find"
    return time.monotonic() - began, cpu_seconds(prometheus.pid) - cpu


def _ask(prometheus: Prometheus, query: Query, now: float) -> int:
    expr = filled(query.expr, ALL)
    if query.instant:
        return len(prometheus.ask("query", query=expr, time=str(now))["result"])
    form = {"query": expr, "start": str(now - SIX_HOURS), "end": str(now), "step": "60"}
    return len(prometheus.ask("query_range", **form)["result"])
