"""What rules and boards can be asked of an engine whose page shows less than vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import promql_parser as promql

from tests.assets.alerts import rules
from tests.assets.promql import parsed, recorded
from tests.dashboards.grafana import NAMES, VARIABLE, load, panels, queries
from tests.dashboards.history import Target, open_metrics
from tests.dashboards.store import SCRAPE_SECONDS
from vllm_headroom.parse.profiles import PROFILES
from vllm_headroom_tools.demo.world import TABLE
from vllm_headroom_tools.doctor.engine import SERIES

PAGES: Final = Path(__file__).parents[1] / "contract"
VLLM: Final = "vLLM"
ENGINES: Final[Mapping[str, Path]] = {
    VLLM: PAGES / "captures" / "vllm-0.32.0" / "load-waiting.prom",
    "SGLang": PAGES / "engines" / "sglang-0.5.23.prom",
    "TensorRT-LLM": PAGES / "engines" / "tensorrt-llm.prom",
    "LMDeploy": PAGES / "engines" / "lmdeploy-0.18.0.prom",
    "Text Generation Inference": PAGES / "engines" / "tgi.prom",
    "llama.cpp": PAGES / "engines" / "llama-cpp-load.prom",
    "Aphrodite": PAGES / "engines" / "aphrodite.prom",
    "Dynamo": PAGES / "engines" / "dynamo-component.prom",
}
"""A page of each under load."""

HOURS: Final = 1.6
"""The leak is sure after 1.3 h."""

END: Final = 1_767_225_600
RECORDED: Final = dict(recorded())
TARGETS: Final = {
    engine: Target(
        scenario=TABLE["leak"],
        labels={"namespace": f"team-{number}", "job": "vllm-headroom", "instance": f"10.2.0.{number}:9839"},
        page=path.read_text(encoding="utf-8"),
    )
    for number, (engine, path) in enumerate(ENGINES.items())
}


@cache
def scraped() -> str:
    """Return hours of a leak beside the page of each engine, as a Prometheus scrapes them."""
    return open_metrics(list(TARGETS.values()), HOURS, ends_seconds=END, scrape_seconds=SCRAPE_SECONDS)


@cache
def metrics(engine: str) -> frozenset[str]:
    """Return the metrics that the daemon has in these hours."""
    instance = f'instance="{TARGETS[engine].labels["instance"]}"'
    return frozenset(line.partition("{")[0] for line in scraped().splitlines() if instance in line)


def told(engine: str) -> frozenset[str]:
    """Return the metrics that doctor says to be absent: they are made of what this engine does not tell."""
    (profile,) = (engine_profile for engine_profile in PROFILES if engine_profile.product == engine)
    return frozenset(metric.name for name, _ in profile.absent for metric in SERIES.get(name, ()))


@cache
def lost(engine: str) -> frozenset[str]:
    """Return the metrics that are there for vLLM, and not for this engine."""
    return metrics(VLLM) - metrics(engine) | told(engine)


def answers(expr: Any, lost: frozenset[str]) -> bool:
    """Tell whether an expression can have a result without these metrics."""
    match expr:
        case promql.VectorSelector():
            return _found(expr, lost)
        case promql.BinaryExpr():
            sides = answers(expr.lhs, lost), answers(expr.rhs, lost)
            return {"or": any(sides), "unless": sides[0]}.get(str(expr.op), all(sides))
        case promql.Call():
            return expr.func.name == "absent" or all(answers(argument, lost) for argument in expr.args)
    inner = getattr(expr, "vector_selector", None) or getattr(expr, "expr", None)
    return inner is None or answers(inner, lost)  # what has nothing inside is a number or a text


def _found(selector: Any, lost: frozenset[str]) -> bool:
    states = [matcher.value for matcher in selector.matchers.matchers if matcher.name == "state"]
    if selector.name == "headroom_engine_state" and states == ["asleep"] and "headroom_engine_awake" in lost:
        return False  # the series is there, and never 1
    rule = RECORDED.get(selector.name, "")
    if rule and selector.name not in rule:  # one that asks for itself keeps what it had
        return answers(parsed(rule), lost)
    return selector.name not in lost


def rules_without(engine: str) -> set[str]:
    """Return the alerts that can never fire of this engine."""
    return {rule.name for rule in rules() if rule.is_alert and not answers(parsed(rule.expr), lost(engine))}


def queries_without(engine: str, board: str) -> set[tuple[str, str]]:
    """Return the queries of a board's panels, by title and name, that never have a result of this engine."""
    every = [query for panel in panels(load(board)) for query in queries(panel)]
    return {(query.where, query.name) for query in every if not answers(parsed(plain(query.expr)), lost(engine))}


def table() -> str:
    """Return for docs what alerts and panels cannot report about each engine."""
    rows = [
        "| engine | alerts that stay silent | panels that stay empty | panels that lack a part |",
        "|" + 4 * " --- |",
    ]
    for engine in ENGINES:
        cells = (sorted(rules_without(engine)), *_panels_without(engine))
        rows.append(f"| {engine} | {' | '.join(', '.join(cell) or '-' for cell in cells)} |")
    return "\n".join(rows)


def _panels_without(engine: str) -> tuple[list[str], list[str]]:
    """Return the panels that stay empty, and those that lack a part."""
    panel_lists: tuple[list[str], list[str]] = [], []
    for board in NAMES:
        without = queries_without(engine, board)
        for panel in panels(load(board)):
            panel_queries = {(query.where, query.name) for query in queries(panel)}
            if panel_queries & without:
                where = "" if board == "headroom" else f" ({board})"
                panel_lists[0 if panel_queries <= without else 1].append(f"{panel['title']}{where}")
    return panel_lists


def plain(expr: str) -> str:
    """Return a board's expression with something for each variable."""
    return VARIABLE.sub(lambda match: "1m" if "__" in match[0] else ".*", expr)
