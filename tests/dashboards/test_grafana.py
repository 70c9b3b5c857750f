"""What represents a variable is what Grafana puts there, and alerts are what Prometheus makes of their rules."""

from __future__ import annotations

import pytest

from tests.dashboards.grafana import ALL, Json, filled, interpolated, used
from tests.dashboards.rules import evaluated

WITH_ALL: Json = {"name": "pod", "allValue": ".*"}
WITHOUT_ALL: Json = {"name": "gpu"}


@pytest.mark.parametrize(
    ("variable", "chosen", "put_in"),
    [
        (WITH_ALL, [ALL], ".*"),
        (WITHOUT_ALL, [ALL], "(0|1)"),
        (WITH_ALL, ["a-1"], "a-1"),
        (WITH_ALL, ["a-1", "b-2"], "(a-1|b-2)"),
        (WITH_ALL, ["10.0.0.7:9839"], r"10\\.0\\.0\\.7:9839"),
        (WITH_ALL, ["a\\b"], "a" + 4 * "\\" + "b"),
    ],
)
def test_what_is_chosen_is_a_regular_expression_in_a_quoted_text(
    variable: Json, chosen: list[str], put_in: str
) -> None:
    assert interpolated(variable, chosen, ["0", "1"]) == put_in


def test_variables_are_filled_in_and_groups_of_a_replacement_are_left() -> None:
    expr = 'label_replace(x{pod=~"$pod",gpu=~"${gpu:regex}"}[$__range], "a", "$1", "b", "(.+)")'

    assert used(expr) == {"pod", "gpu", "__range"}
    assert filled(expr, {"pod": "p", "gpu": "0", "__range": "1h"}) == (
        'label_replace(x{pod=~"p",gpu=~"0"}[1h], "a", "$1", "b", "(.+)")'
    )


def alert_at(seconds: list[int]) -> dict[str, list[float]]:
    """Return when HeadroomGpuMemoryLeak (for 5 min, kept for 15 min) is pending and firing, where it holds then."""
    values = [[at, "1"] for at in seconds]
    text = evaluated(lambda expr: [{"metric": {}, "values": values}] if "< 86400" in expr else [], range(0, 3600, 30))
    lines = [line.rsplit(" ", 2) for line in text.splitlines() if 'alertname="HeadroomGpuMemoryLeak"' in line]
    return {
        state: [float(at) for labels, _, at in lines if f'alertstate="{state}"' in labels]
        for state in ("pending", "firing")
    }


def test_an_alert_is_pending_then_fires_and_is_kept() -> None:
    when = alert_at(list(range(60, 600, 30)))

    assert when["pending"] == list(range(60, 360, 30))
    assert when["firing"] == list(range(360, 570 + 15 * 60, 30))


def test_an_alert_that_is_gone_for_a_moment_waits_again() -> None:
    when = alert_at([*range(60, 330, 30), *range(390, 600, 30)])

    assert when["firing"] == []
