"""What docs/fleet.md says may be dropped is requested nowhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from tests.assets.promql import parsed, selectors, written_rules
from tests.dashboards.grafana import NAMES, every_query, load
from tests.dashboards.lint_queries import trees
from vllm_headroom.catalog import METRICS

PAGE: Final = (Path(__file__).parents[2] / "docs" / "fleet.md").read_text(encoding="utf-8")
(DROPPED,) = re.findall(r"regex: (headroom_.+)", PAGE)


def asked() -> set[str | None]:
    rules = [rule["expr"] for rule in written_rules()]
    boards = [tree for name in NAMES for _, tree in trees(every_query(load(name)))]
    return {selector.name for tree in (*map(parsed, rules), *boards) for selector in selectors(tree)}


def test_what_is_dropped_is_there_and_asked_for_by_no_rule_and_no_board() -> None:
    dropped = {metric.name for metric in METRICS if re.fullmatch(DROPPED, metric.name)}

    assert len(dropped) == DROPPED.count("|") + 1
    assert not dropped & asked()
