"""The Collector's configuration says what it should; no Collector that could run it is had from a package index."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import yaml

from tests.assets.promql import vocabulary
from vllm_headroom.catalog import METRICS

FILE: Final = Path(__file__).parents[2] / "deploy" / "otel" / "collector.yaml"
CONFIG: Final[dict[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
GROUPS: Final = CONFIG["processors"]["transform/hw"]["metric_statements"]
STATEMENTS: Final = [statement for group in GROUPS for statement in group["statements"]]

SEMANTIC: Final = {
    "hw.gpu.memory.limit": ("sum", "By"),
    "hw.gpu.memory.usage": ("sum", "By"),
    "hw.gpu.utilization": ("gauge", "1"),
    "hw.temperature": ("gauge", "Cel"),
    "hw.power": ("gauge", "W"),
    "hw.errors": ("counter", "{error}"),
}
"""Kind and unit of each, as in opentelemetry-semantic-conventions 0.66b2."""

ATTRIBUTES: Final = {"hw.id", "hw.type", "hw.gpu.task", "error.type"}

_WHERE: Final = r'(?: where (?:metric\.name == "(?P<name>\w+)"|IsMatch\(metric\.name, "(?P<pattern>[^"]+)"\)))?'
FORM: Final = re.compile(
    r'(?:set\(metric\.(?P<what>name|unit), "(?P<to>[^"]+)"\)'
    r'|set\(datapoint\.attributes\["(?P<attribute>[\w.]+)"\], (?:"\w+"|datapoint\.attributes\["(?P<label>\w+)"\])\)'
    r'|convert_gauge_to_sum\("cumulative", false\)'
    r'|delete_key\(datapoint\.attributes, "(?P<deleted>\w+)"\))' + _WHERE
)
"""Every form of a statement that is used; the transform processor's README has them."""

CATALOGUE: Final = {metric.name: metric for metric in METRICS}


def read(statement: str) -> re.Match[str]:
    match = FORM.fullmatch(statement)
    assert match, statement
    return match


def meant(match: re.Match[str]) -> set[str]:
    """Return the catalogue's metrics that a statement is about."""
    if match["name"]:
        return {match["name"]}
    return {name for name in CATALOGUE if re.search(match["pattern"] or "", name)}


def carried() -> dict[str, str]:
    """Return the new name of each metric that gets one."""
    names = (read(statement) for statement in STATEMENTS)
    return {name["name"]: name["to"] for name in names if name["what"] == "name"}


def test_the_pipeline_is_of_parts_that_are_there() -> None:
    (pipeline,) = CONFIG["service"]["pipelines"].values()

    for kind, parts in pipeline.items():
        assert list(CONFIG[kind]) == parts


def test_every_statement_is_about_metrics_that_the_daemon_has() -> None:
    assert all(meant(read(statement)) <= CATALOGUE.keys() for statement in STATEMENTS)
    assert set(carried().values()) == SEMANTIC.keys()


def test_each_gets_the_unit_and_the_kind_of_its_new_name() -> None:
    units = [read(statement) for statement in STATEMENTS if "metric.unit" in statement]
    (sums,) = (meant(read(statement)) for statement in STATEMENTS if statement.startswith("convert_gauge"))

    for name, semantic in carried().items():
        kind, unit = SEMANTIC[semantic]
        assert [unit_statement["to"] for unit_statement in units if name in meant(unit_statement)] == [unit], name
        assert CATALOGUE[name].kind == ("counter" if kind == "counter" else "gauge")
        assert (name in sums) == (kind == "sum")


def test_the_condition_takes_what_gets_a_new_name_and_no_more() -> None:
    ((condition,),) = (group["conditions"] for group in GROUPS if "conditions" in group)
    pattern = re.fullmatch(r"IsMatch\(metric\.name, \"(.+)\"\)", condition)
    assert pattern

    assert {name for name in CATALOGUE if re.search(pattern[1], name)} == carried().keys()


def test_attributes_are_made_of_labels_that_are_there_and_go_then() -> None:
    statements = [read(statement) for statement in STATEMENTS]
    labels = vocabulary()

    assert {statement["attribute"] for statement in statements if statement["attribute"]} == ATTRIBUTES
    assert [statement["label"] for statement in statements if statement["label"]] == [
        statement["deleted"] for statement in statements if statement["deleted"]
    ]
    assert all("uuid" in labels[name] for name in carried())
    assert "xid" in labels["headroom_gpu_xid_errors_total"]
    assert "$" not in "".join(STATEMENTS)


def test_names_change_last() -> None:
    places = [place for place, statement in enumerate(STATEMENTS) if "set(metric.name" in statement]

    assert places == list(range(len(STATEMENTS) - len(SEMANTIC), len(STATEMENTS)))
