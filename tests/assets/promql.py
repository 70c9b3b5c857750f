"""What an expression is about: which metrics, which labels its result keeps, and what about it can never match."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import promql_parser as promql
import yaml

from vllm_headroom.catalog import METRICS
from vllm_headroom.vocabulary import REASONS, Attribution, ExitReason, LeakState, Role, Source, Work

RULES: Final = Path(__file__).parents[2] / "alerts" / "rules"
TARGET: Final = frozenset({"cluster", "namespace", "job", "pod", "instance"})
"""Labels that the scrape may add; on bare metal only job and instance are there."""

PROCESS: Final = ("process_resident_memory_bytes", "process_cpu_seconds_total", "process_start_time_seconds")

CONTRACT: Final = Path(__file__).parent / "contract.txt"

CLOSED: Final[Mapping[str, frozenset[str]]] = {
    "attribution": frozenset(Attribution),
    "basis": frozenset({"budget", "configured", "metric", "probe"}),
    "holder": frozenset({"engine", "other", "unattributed"}),
    "process": frozenset(Role),
    "reason": frozenset(reason for reasons in REASONS.values() for reason in reasons),
    "source": frozenset(Source),
    "state": frozenset(LeakState),
    "work": frozenset(Work),
}
"""The values of labels whose values are a closed set."""

CLOSED_OF: Final[Mapping[tuple[str, str], frozenset[str]]] = {
    ("headroom_engine_state", "state"): frozenset({"unknown", "down", "starting", "serving", "stalled", "asleep"}),
    ("headroom_engine_exits_total", "reason"): frozenset(ExitReason),
    ("kube_pod_container_status_terminated_reason", "reason"): frozenset({"Completed", "Error", "OOMKilled"}),
    ("gpu:headroom_gpu_room:rank", "state"): frozenset({*LeakState, "lost"}),
}
"""The same where a metric has other words for a label."""

KUBE: Final = {
    "kube_deployment_spec_replicas": "deployment",
    "kube_deployment_status_observed_generation": "deployment",
    "kube_deployment_status_replicas_available": "deployment",
    "kube_statefulset_replicas": "statefulset",
    "kube_statefulset_status_observed_generation": "statefulset",
    "kube_statefulset_status_replicas_ready": "statefulset",
    "kube_pod_container_info": "pod,container,image",
    "kube_pod_container_status_ready": "pod,container",
    "kube_pod_init_container_status_ready": "pod,container",
    "kube_pod_container_status_terminated_reason": "pod,container,reason",
}
"""What kube-state-metrics exports of it, where it is there."""

VLLM: Final = {
    "vllm:time_to_first_token_seconds_bucket": "model_name,engine,le",
    "vllm:request_success_total": "model_name,engine,finished_reason",
    "http_requests_total": "handler,method,status",
}
"""What vLLM's own page exports of it, where Prometheus scrapes that too."""

Labels = frozenset[str]
Vocabulary = Mapping[str, Labels]
"""The labels of each metric."""

Kept = tuple[Labels | None, list[str]]
"""The labels that a result can have (None: it is a number) and what is wrong."""


def parsed(expr: str) -> promql.Expr:
    """Return the syntax tree, typed as what it is."""
    return promql.parse(expr)


@cache
def vocabulary() -> dict[str, Labels]:
    """Return every metric there can be: the daemon's, those of the recording rules, Prometheus's own."""
    metric_labels = {name: agreed_labels | TARGET for name, agreed_labels in agreed()} | {
        metric.name: frozenset(metric.labels) | TARGET for metric in METRICS
    }
    metric_labels |= dict.fromkeys(("up", *PROCESS), TARGET)
    metric_labels |= {name: frozenset({"cluster", "namespace", *labels.split(",")}) for name, labels in KUBE.items()}
    metric_labels |= {name: TARGET.union(labels.split(",")) for name, labels in VLLM.items()}
    metric_labels |= dict.fromkeys(("ALERTS", "ALERTS_FOR_STATE"), TARGET)
    for name, expr in recorded():
        metric_labels[name] = labels(parsed(expr), metric_labels)[0] or frozenset()
    metric_labels["headroom:runbooks:info"] = frozenset({"address"})  # alerts/generate.py makes it of an address
    alerting = frozenset().union(*metric_labels.values()) | {"alertname", "severity", "area"}
    return metric_labels | {"ALERTS": alerting | {"alertstate"}, "ALERTS_FOR_STATE": alerting}


def agreed() -> Iterator[tuple[str, Labels]]:
    """Yield the metrics that the contract has and the daemon does not yet: without them their alerts are silent."""
    for line in CONTRACT.read_text(encoding="utf-8").splitlines():
        if line.startswith("later "):
            _, name, _, named = line.split()
            yield name, frozenset(named.split(",")) - {"-"}


def recorded() -> Iterator[tuple[str, str]]:
    """Yield the recording rules, each after those it needs."""
    yield from ((rule["record"], rule["expr"]) for rule in written_rules() if "record" in rule)


@cache
def written_rules() -> tuple[Mapping[str, Any], ...]:
    """Return every rule of every group, as its file has it."""
    documents = [read_yaml(path.read_text(encoding="utf-8")) for path in sorted(RULES.glob("*.yaml"))]
    return tuple(rule for document in documents for group in document["groups"] for rule in group["rules"])


def read_yaml(text: str) -> Any:
    """Return what a document says, by libyaml: the parser in Python takes ten times as long."""
    return yaml.load(text, Loader=yaml.CSafeLoader)


def nodes(expr: promql.Expr) -> list[promql.Expr]:
    """Return the tree's nodes, each before what is in it; a range's selector is in it as `vector_selector`."""
    found_nodes: list[promql.Expr] = []
    promql.walk(expr, found_nodes.append)
    return found_nodes


def selectors(expr: promql.Expr) -> list[promql.VectorSelector]:
    """Return every selection of series, those with a range too."""
    inner = (node.vector_selector if isinstance(node, promql.MatrixSelector) else node for node in nodes(expr))
    return [node for node in inner if isinstance(node, promql.VectorSelector)]


def labels(expr: promql.Expr, metric_labels: Vocabulary) -> Kept:
    """Return the labels that the result can have and every fault: unknown names, and operands that never match."""
    return _READERS[type(expr)](expr, metric_labels)


def _unknown(wanted: Iterator[str] | list[str], there: Labels, subject: str) -> list[str]:
    return [f"{subject} has no label {label}" for label in wanted if label not in there]


def _selector(expr: Any, metric_labels: Vocabulary) -> Kept:
    if expr.name not in metric_labels:
        return frozenset(), [f"there is no metric {expr.name}"]
    matchers = [*expr.matchers.matchers, *(matcher for group in expr.matchers.or_matchers for matcher in group)]
    faults = _unknown([matcher.name for matcher in matchers], metric_labels[expr.name], expr.name)
    return metric_labels[expr.name], faults + [fault for matcher in matchers for fault in _values(expr.name, matcher)]


def _values(metric: str, matcher: promql.Matcher) -> list[str]:
    """Return what a matcher on a closed set requests and never finds; what is no list of words is left alone."""
    words = matcher.value.split("|") if matcher.op in (promql.MatchOp.Re, promql.MatchOp.NotRe) else [matcher.value]
    closed = CLOSED_OF.get((metric, matcher.name), CLOSED.get(matcher.name))
    if closed is None or not all(re.fullmatch(r"\w*", word) for word in words):
        return []
    return [f"{matcher.name} is never {word}" for word in words if word and word not in closed]


def _call(expr: Any, metric_labels: Vocabulary) -> Kept:
    read = [labels(argument, metric_labels) for argument in expr.args]
    faults = [fault for _, argument_faults in read for fault in argument_faults]
    if expr.func.name in {"vector", "time", "scalar", "pi"}:
        return (frozenset() if expr.func.name == "vector" else None), faults
    kept_labels = next((argument_labels for argument_labels, _ in read if argument_labels is not None), None)
    if kept_labels is not None and expr.func.name in {"label_replace", "label_join"}:
        kept_labels |= {expr.args[1].val}
    return kept_labels, faults


def _aggregate(expr: Any, metric_labels: Vocabulary) -> Kept:
    inner, faults = labels(expr.expr, metric_labels)
    there = inner or frozenset()
    if expr.modifier is None:
        return (there if str(expr.op) in {"topk", "bottomk"} else frozenset()), faults
    named = expr.modifier.labels
    faults = faults + _unknown(named, there, f"what {expr.op} is over")
    if str(expr.op) in {"topk", "bottomk"}:
        return there, faults
    by = expr.modifier.type == promql.AggModifierType.By
    return (there & frozenset(named) if by else there - frozenset(named)), faults


def _binary(expr: Any, metric_labels: Vocabulary) -> Kept:
    (left_labels, left_faults), (right, right_faults) = labels(expr.lhs, metric_labels), labels(expr.rhs, metric_labels)
    faults = left_faults + right_faults
    if left_labels is None or right is None:
        return (right if left_labels is None else left_labels), faults
    on, named = _matching(expr.modifier)
    if str(expr.op) == "or":
        return left_labels | right, faults
    if on:
        for side, there in (("left", left_labels), ("right", right)):
            faults += _unknown(sorted(named), there, f"the {side} of {expr.op}")
    elif odd := (left_labels - named) ^ (right - named):
        faults.append(f"the sides of {expr.op} never match: only one has {', '.join(sorted(odd))}")
    if str(expr.op) in {"and", "unless"}:
        return left_labels, faults
    return _joined(expr.modifier, left_labels, right, named if on else (left_labels & right) - named), faults


def _matching(modifier: promql.BinModifier | None) -> tuple[bool, Labels]:
    if modifier is None or modifier.matching is None:
        return False, frozenset()
    return modifier.matching.type == promql.LabelModifierType.Include, frozenset(modifier.matching.labels)


def _joined(modifier: promql.BinModifier | None, left_labels: Labels, right: Labels, matched: Labels) -> Labels:
    group_labels = frozenset((modifier and modifier.group_labels) or ())
    if modifier and modifier.card == promql.VectorMatchCardinality.ManyToOne:
        return left_labels | group_labels
    if modifier and modifier.card == promql.VectorMatchCardinality.OneToMany:
        return right | group_labels
    return matched


def _number(_: promql.Expr, __: Vocabulary) -> Kept:
    return None, []


def _inner(expr: Any, metric_labels: Vocabulary) -> Kept:
    return labels(expr.expr, metric_labels)


_READERS: Final[Mapping[type[promql.Expr], Callable[[Any, Vocabulary], Kept]]] = {
    promql.AggregateExpr: _aggregate,
    promql.BinaryExpr: _binary,
    promql.Call: _call,
    promql.MatrixSelector: lambda expr, metric_labels: _selector(expr.vector_selector, metric_labels),
    promql.NumberLiteral: _number,
    promql.ParenExpr: _inner,
    promql.StringLiteral: _number,
    promql.SubqueryExpr: _inner,
    promql.UnaryExpr: _inner,
    promql.VectorSelector: _selector,
}
