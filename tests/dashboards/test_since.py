"""Since when a leak has been known: the alarm that is on, not one of an earlier run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.dashboards.grafana import filled, load, panels, queries
from tests.dashboards.store import missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"not on the PATH: {missing()} (Debian: prometheus)")

ANY: Final = dict.fromkeys(("cluster", "namespace", "job", "pod", "instance", "uuid"), ".*")


@pytest.mark.parametrize(
    ("values", "since_minutes"),
    [("0x59 1x60", 59), ("1x30 0x59 1x30", 90), ("1x120", 0), ("1x60 0x60", None)],
    ids=["once", "again after a restart", "longer than is shown", "no more"],
)
def test_leaking_since_is_of_the_alarm_that_is_on(tmp_path: Path, values: str, since_minutes: int | None) -> None:
    (panel,) = (panel for panel in panels(load("headroom")) if panel["title"] == "Leaked")
    (expr,) = (query.expr for query in queries(panel) if query.name == "leaking since")
    expected_samples = [] if since_minutes is None else [{"labels": "{}", "value": 60_000 * since_minutes}]
    series = {"series": 'headroom_leak_state{instance="a",gpu="0",uuid="u",state="leaking"}', "values": values}
    expression_test = {
        "expr": filled(expr, {**ANY, "__range": "2h"}),
        "eval_time": "2h",
        "exp_samples": expected_samples,
    }
    test = {"interval": "1m", "input_series": [series], "promql_expr_test": [expression_test]}
    (tmp_path / "test.yaml").write_text(json.dumps({"evaluation_interval": "1m", "tests": [test]}), encoding="utf-8")

    command = ["promtool", "test", "rules", str(tmp_path / "test.yaml")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
