"""The alerts and their tests, read, and what may be wrong with them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import promql_parser as promql

from tests.assets.promql import RULES, Labels, labels, parsed, read_yaml, selectors, vocabulary, written_rules
from vllm_headroom.parse.profiles import PROFILES

FOLDER: Final = RULES.parent
TESTS: Final = tuple(sorted((FOLDER / "tests").glob("*.yaml")))

KNOWN: Final = vocabulary()
INPUTS: Final = frozenset(name for profile in PROFILES for name, _ in profile.inputs)

_QUERY: Final = re.compile(r'printf "((?:[^"\\]|\\.)*)"[^|{}]*\| query\b')


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule; `annotations` are empty where it records."""

    name: str
    is_alert: bool
    expr: str
    labels: dict[str, str]
    annotations: dict[str, str]


def rules() -> list[Rule]:
    """Return every rule of every group."""
    return [_rule(rule) for rule in written_rules()]


def _rule(read: Mapping[str, Any]) -> Rule:
    return Rule(
        name=read.get("alert") or read["record"],
        is_alert="alert" in read,
        expr=read["expr"],
        labels=read.get("labels", {}),
        annotations=read.get("annotations", {}),
    )


def unknown_alerts(text: str) -> set[str]:
    """Return the names in a text that begin no alert's; a beginning represents several, as in "both HeadroomGpu"."""
    names = [rule.name for rule in rules() if rule.is_alert]
    names_in_text = set(re.findall(r"\bHeadroom[A-Z]\w*", text))
    return {beginning for beginning in names_in_text if not any(name.startswith(beginning) for name in names)}


def query_faults(expr: str) -> list[str]:
    """Return what an expression asks for that there is not: metrics, labels, words; or that it is no PromQL."""
    try:
        tree = parsed(expr)
    except ValueError as error:
        return [f"{error}: {expr}"]
    return labels(tree, KNOWN)[1] + list(_input_faults(tree))


def _input_faults(tree: promql.Expr) -> Iterator[str]:
    for selector in selectors(tree):
        for matcher in selector.matchers.matchers:
            words = matcher.value.split("|") if matcher.name == "input" else ()
            yield from (f"input is never {word}" for word in words if word and word not in INPUTS)


def series_faults(series: str) -> list[str]:
    """Return how a test's series differs from the daemon's, which has every label of its metric and no other."""
    faults = query_faults(series)
    if faults:
        return faults
    (selector,) = selectors(parsed(series))
    matched_labels = {matcher.name for matcher in selector.matchers.matchers}
    scraped = KNOWN["up"]
    missing = (KNOWN[selector.name or ""] - scraped | {"job", "instance"}) - matched_labels
    return [f"{selector.name} needs the label {label}" for label in sorted(missing)]


def kept_labels(expr: str) -> Labels:
    """Return the labels that the result can have."""
    return labels(parsed(expr), KNOWN)[0] or frozenset()


def template_queries(text: str) -> list[str]:
    """Return the queries of an annotation's template, with "" for what is put in when it is rendered."""
    queries = [re.sub(r"\\(.)", r"\1", match).replace("%q", '""').replace("%f", "0") for match in _QUERY.findall(text)]
    if len(queries) != len(re.findall(r"\bquery\b *(?:\}|\")", text)):
        msg = f"a query that cannot be read: {text}"
        raise ValueError(msg)
    return queries


def text_faults(text: str) -> list[str]:
    """Return what shows that a rendered text was put together by a machine."""
    signs = {
        "two spaces": r"  ",
        "a space before a stop": r" [.,;:](?: |$)",
        "no number": r"\bNaN|[+-]Inf",
        "a template that went wrong": r"<no value>|%!|\{\{|<error",
        "one of many": r"(?<![\d.,])1 (?:requests|tokens|times|processes|GPUs)\b",
        "no full stop": r"[^.]$",
    }
    return [f"{sign}: {text}" for sign, pattern in signs.items() if re.search(pattern, text)]


def expectations() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield each check of the tests: its alert, and what is to fire with labels and annotations, or nothing."""
    for test in _tests():
        for check in test.get("alert_rule_test", ()):
            yield check["alertname"], check.get("exp_alerts") or []


def input_series() -> set[str]:
    """Return the series that the tests feed."""
    return {an_input["series"] for test in _tests() for an_input in test["input_series"]}


def narrowed(path: Path, folder: Path) -> list[Path]:
    """Return a file for each test of a file, which checks the same with the rules that it names and what they read.

    Promtool evaluates every rule: that takes ten times as long. That each can be evaluated is seen in the situations.
    """
    document = read_yaml(path.read_text(encoding="utf-8"))
    files = []
    for number, test in enumerate(document["tests"]):
        assert all(isinstance(an_input["values"], str) for an_input in test["input_series"]), (
            "quote 0x99: it is a number in YAML"
        )
        text = json.dumps(test)
        asks_for_all = re.search(r"ALERTS(?!\{alertname=)|alertname=~[^,}]*[.*+]", text)
        groups = _read_groups() if asks_for_all else narrow_groups(text)
        rules, file = folder / f"rules-{number}.yaml", folder / f"test-{number}.yaml"
        rules.write_text(json.dumps({"groups": groups}), encoding="utf-8")
        narrow = document | {"rule_files": [str(rules)], "tests": [test]}
        file.write_text(json.dumps(narrow), encoding="utf-8")
        files.append(file)
    return files


def narrow_groups(text: str) -> list[dict[str, Any]]:
    """Return the groups with the rules alone that a text names, and those that they read."""
    groups = _read_groups()
    needed = _needed(text, [rule for group in groups for rule in group["rules"]])
    return [group | {"rules": [rule for rule in group["rules"] if _rule(rule).name in needed]} for group in groups]


def _read_groups() -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = read_yaml((RULES / "headroom.yaml").read_text(encoding="utf-8"))["groups"]
    return groups


def _needed(text: str, read: Iterable[dict[str, Any]]) -> set[str]:
    """Return the names of the rules that a text names, and of those that they name in turn."""
    rule_texts = {_rule(rule).name: json.dumps(rule) for rule in read}
    needed = {name for name in rule_texts if name in text}
    while newly_named := {
        name for name in rule_texts.keys() - needed if any(name in rule_texts[needed_name] for needed_name in needed)
    }:
        needed |= newly_named
    return needed


@cache
def _tests() -> Iterable[dict[str, Any]]:
    return [test for path in TESTS for test in read_yaml(path.read_text(encoding="utf-8"))["tests"]]
