"""What may be wrong with a dashboard's queries."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import timedelta
from functools import cache
from typing import Any, Final

import promql_parser as promql

from tests.assets.promql import TARGET, labels, nodes, parsed, selectors, vocabulary
from tests.dashboards.grafana import Json, Query, every_query, filled, marked, panels, queries, used, variables
from tests.dashboards.lint import Fault, Faults

KNOWN: Final = vocabulary()
RATES: Final = frozenset({"rate", "irate", "increase"})
COUNTS: Final = RATES | {"resets", "changes"}
"""What a counter has to be inside of."""

RATE_INTERVAL: Final = timedelta(minutes=4, seconds=3)
"""A length that nobody writes by hand represents $__rate_interval."""

BUILT_IN: Final = {"__rate_interval": "4m3s", "__range": "6h", "__interval": "30s"}


@cache
def tree(expr: str) -> promql.Expr | str:
    """Return the expression's syntax tree, or what is wrong with it."""
    try:
        return parsed(filled(expr, {name: name for name in used(expr)} | BUILT_IN))
    except ValueError as error:
        return str(error)


def trees(all_queries: Iterable[Query]) -> Iterator[tuple[Query, promql.Expr]]:
    """Yield the queries that are valid, each with its tree."""
    for query in all_queries:
        if not isinstance(read := tree(query.expr), str):
            yield query, read


def valid(dashboard: Json) -> Faults:
    """An expression is PromQL, and its variables exist."""
    there = {variable["name"] for variable in variables(dashboard)} | BUILT_IN.keys()
    for query in every_query(dashboard):
        if isinstance(read := tree(query.expr), str):
            yield Fault(where=query.where, problem=read)
        for name in used(query.expr) - there:
            yield Fault(where=query.where, problem=f"there is no variable {name}")


def known(dashboard: Json) -> Faults:
    """Every metric and label exists: in the catalogue, as a recording rule, or as Prometheus's own."""
    for query, expr in trees(every_query(dashboard)):
        yield from (Fault(where=query.where, problem=fault) for fault in labels(expr, KNOWN)[1])


def narrowed(dashboard: Json) -> Faults:
    """A query asks for what is chosen: by every variable that its metric has a label for."""
    names = {variable["name"] for variable in variables(dashboard) if variable["type"] == "query"}
    panel_queries = [query for panel in panels(dashboard) for query in queries(panel)]
    for query, expr in trees(panel_queries + marked(dashboard)):
        for selector in selectors(expr):
            there = (
                TARGET
                if selector.name in {"ALERTS", "ALERTS_FOR_STATE"}
                else KNOWN.get(selector.name or "", frozenset())
            )
            by = {matcher.name for matcher in selector.matchers.matchers if _is_choice(matcher)}
            for name in sorted(names & there - by):
                yield Fault(where=query.where, problem=f'{selector.name} is not narrowed by {name}=~"${name}"')


def _is_choice(matcher: promql.Matcher) -> bool:
    """Return whether it reads x=~"$x", of which `tree` has made x=~"x"; with a | it takes what has none as well."""
    return matcher.op == promql.MatchOp.Re and matcher.value.removesuffix("|") == matcher.name


def rates(dashboard: Json) -> Faults:
    """A rate's range fits the resolution and the scrapes: only Grafana knows both."""
    for query, expr in trees(every_query(dashboard)):
        for call in _calls(expr):
            if call.func.name in RATES and getattr(call.args[0], "range", None) != RATE_INTERVAL:
                yield Fault(where=query.where, problem=f"{call.func.name} is not over $__rate_interval")


def counters(dashboard: Json) -> Faults:
    """A counter is never shown as it is: it falls to 0 at a restart."""
    for query, expr in trees(every_query(dashboard)):
        inside = [str(selector) for call in _calls(expr) if call.func.name in COUNTS for selector in selectors(call)]
        for bare in Counter(str(vector_selector) for vector_selector in selectors(expr)) - Counter(inside):
            if re.match(r"\w+_total\b", bare):
                yield Fault(where=query.where, problem=f"{bare.partition('{')[0]} is not inside rate or the like")


def _calls(expr: promql.Expr) -> list[Any]:
    return [node for node in nodes(expr) if isinstance(node, promql.Call)]


def fresh(dashboard: Json) -> Faults:
    """A number that stands alone is of now: the last one of a range may be minutes old, its engine gone."""
    for panel in panels(dashboard):
        if panel["type"] in {"stat", "table"}:
            for query in queries(panel):
                if not query.instant:
                    yield Fault(where=query.where, problem=f"{query.legend} is the last of a range: ask for an instant")
