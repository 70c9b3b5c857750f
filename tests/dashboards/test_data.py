"""Every query of every dashboard has data from the daemon's own output where it should, and only there."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.dashboards.asking import answer, options, values
from tests.dashboards.expected import expected_empty
from tests.dashboards.grafana import NAMES, Json, every_query, is_ranked, load, panels, queries, variables
from tests.dashboards.store import BARE, TARGETS, Prometheus


def test_every_query_has_data_where_it_should(prometheus: Prometheus, subtests: pytest.Subtests) -> None:
    for name in NAMES:
        for target in TARGETS:
            with subtests.test(name=name, target=target):
                dashboard = load(name)

                assert without_data(prometheus, dashboard, TARGETS[target].labels) == expected_empty(dashboard, target)


def test_over_all_targets_only_that_has_no_data_which_never_has(
    prometheus: Prometheus, subtests: pytest.Subtests
) -> None:
    for name in NAMES:
        with subtests.test(name=name):
            dashboard = load(name)
            never = set.intersection(*(expected_empty(dashboard, target) for target in TARGETS))

            empty_queries = without_data(prometheus, dashboard, {})
            assert empty_queries <= never or any(
                is_ranked(variable) for variable in variables(dashboard) if variable["type"] == "query"
            )


def without_data(prometheus: Prometheus, dashboard: Json, chosen: Mapping[str, str]) -> set[tuple[str, str]]:
    put_in = values(prometheus, dashboard, chosen)
    answers = [(query, answer(prometheus, query, put_in)) for query in every_query(dashboard)]
    return {(query.where, query.name) for query, series in answers if not series}


def test_no_table_has_a_column_of_metrics_names(prometheus: Prometheus, subtests: pytest.Subtests) -> None:
    for name in NAMES:
        with subtests.test(name=name):
            dashboard = load(name)
            put_in = values(prometheus, dashboard, {})
            tables = [panel for panel in panels(dashboard) if panel["type"] == "table"]
            results = [
                result for panel in tables for query in queries(panel) for result in answer(prometheus, query, put_in)
            ]

            assert results
            assert [
                found_series["metric"]["__name__"] for found_series in results if "__name__" in found_series["metric"]
            ] == []


def test_all_offers_every_target_with_the_labels_it_has(prometheus: Prometheus, subtests: pytest.Subtests) -> None:
    for name in NAMES:
        with subtests.test(name=name):
            offered = options(prometheus, load(name), {})

            for label in ("job", "instance", "namespace", "pod", "cluster"):
                assert sorted(offered[label]) == sorted(
                    {target.labels[label] for target in TARGETS.values() if label in target.labels}
                )


def test_a_target_that_is_chosen_is_shown_alone(prometheus: Prometheus, subtests: pytest.Subtests) -> None:
    for target in TARGETS:
        with subtests.test(target=target):
            labels = TARGETS[target].labels
            dashboard = load("headroom")
            put_in = values(prometheus, dashboard, labels)
            panel_queries = [query for panel in panels(dashboard) for query in queries(panel)]
            shown = [result["metric"] for query in panel_queries for result in answer(prometheus, query, put_in)]

            assert {metric["instance"] for metric in shown if "instance" in metric} == {labels["instance"]}
            assert {metric["pod"] for metric in shown if "pod" in metric} == (
                {labels["pod"]} if target != BARE else set()
            )


def test_of_engines_the_worst_is_shown_first(prometheus: Prometheus) -> None:
    offered = options(prometheus, load("headroom"), {})["instance"]
    worst = [TARGETS[name].labels["instance"] for name in ("crash", "sidecar down")]

    assert offered[: len(worst)] == worst
