"""Alerts and boards over the pages of other engines: what has data, and that docs and doctor say what has none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.assets.test_docs_tables import between
from tests.conftest import Golden
from tests.dashboards.asking import answer, values
from tests.dashboards.engines import (
    END,
    ENGINES,
    HOURS,
    TARGETS,
    VLLM,
    lost,
    metrics,
    queries_without,
    rules_without,
    scraped,
    table,
    told,
)
from tests.dashboards.grafana import NAMES, Query, load, panels, queries
from tests.dashboards.rules import evaluated
from tests.dashboards.store import SCRAPE_SECONDS, Prometheus, add, missing, running

DOCS = Path(__file__).parents[2] / "docs" / "engines.md"
WITHOUT_LOAD = {"Dynamo"}
"""Engines whose page shows no load, without which no leak can be distinguished from work."""

OF_VLLM = {"headroom_host_memory_planned_bytes", "headroom_leak_bound_bytes"}
"""What vLLM's options plan and bound; the others have no such options."""

OF_LEAKS = re.compile(r"ALERTS|headroom_leak_|leaking|time_to_oom")
"""Queries of what is there only when something leaks, or an alert fires."""


def test_doctor_says_of_every_metric_that_it_is_not_there_and_why(subtests: pytest.Subtests) -> None:
    for engine in ENGINES:
        with subtests.test(engine=engine):
            assert not told(engine) & metrics(engine)
            unsaid = lost(engine) - told(engine) - OF_VLLM
            assert not unsaid or engine in WITHOUT_LOAD
            assert all("leak" in name or "time_to_oom" in name or "progress" in name for name in unsaid)


def test_docs_say_which_alerts_and_panels_have_no_data(golden: Golden) -> None:
    golden(DOCS, between(DOCS.read_text(encoding="utf-8"), "boards", table()))


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Give a Prometheus over hours of a leak beside the page of each engine, with its rules."""
    if absent := missing():
        pytest.skip(f"not on the PATH: {absent} (Debian: prometheus)")
    folder = tmp_path_factory.mktemp("engines")
    add(folder, "scraped", [scraped()])
    times = range(END - int(HOURS * 3600), END, SCRAPE_SECONDS)
    with running(folder) as there:
        text = evaluated(lambda expr: there.over_time(expr, SCRAPE_SECONDS), times)
    add(folder, "rules", [text])
    with running(folder) as there:
        yield there


def test_the_leak_is_reported_of_every_engine_whose_load_is_known(
    prometheus: Prometheus, subtests: pytest.Subtests
) -> None:
    for engine in ENGINES:
        with subtests.test(engine=engine):
            instance = TARGETS[engine].labels["instance"]
            series = prometheus.over_time(f'ALERTS{{instance="{instance}",alertstate="firing"}}', SCRAPE_SECONDS)
            fired = {a_series["metric"]["alertname"] for a_series in series}

            assert not fired & rules_without(engine)
            assert ({"HeadroomGpuMemoryGrowing", "HeadroomGpuMemoryLeak"} <= fired) == (engine not in WITHOUT_LOAD)


def test_a_panel_has_data_where_vllm_s_has_unless_docs_say_that_it_cannot(
    prometheus: Prometheus, subtests: pytest.Subtests
) -> None:
    for board in NAMES:
        for engine in ENGINES:
            with subtests.test(board=board, engine=engine):
                there, documented = with_data(prometheus, engine, board), queries_without(engine, board)
                unsaid = with_data(prometheus, VLLM, board) - there - documented

                assert not there & documented
                assert all(OF_LEAKS.search(query.expr) for query in shown(board) if (query.where, query.name) in unsaid)
                assert not unsaid or engine in WITHOUT_LOAD


def with_data(prometheus: Prometheus, engine: str, board: str) -> set[tuple[str, str]]:
    """Return the queries of a board's panels that have a result of this engine's sidecar."""
    dashboard = load(board)
    put_in = values(prometheus, dashboard, TARGETS[engine].labels)
    return {(query.where, query.name) for query in shown(board) if answer(prometheus, query, put_in)}


def shown(board: str) -> list[Query]:
    """Return the queries of a board's panels."""
    return [query for panel in panels(load(board)) for query in queries(panel)]
