"""The catalogue is the public contract, both ways."""

from __future__ import annotations

import re
from pathlib import Path

from vllm_headroom.catalog import METRICS
from vllm_headroom.vocabulary import MetricType

CONTRACT = (Path(__file__).parent / "contract.txt").read_text(encoding="utf-8").splitlines()
"""One line a metric: name, type, labels; frozen. A line that begins with "later" is agreed and not shipped yet."""


def shipped() -> set[str]:
    return {" ".join((metric.name, str(metric.kind), ",".join(metric.labels) or "-")) for metric in METRICS}


def test_the_catalogue_is_the_contract() -> None:
    agreed = {line for line in CONTRACT if line and not line.startswith(("#", "later "))}

    assert shipped() == agreed


def test_what_has_shipped_is_not_called_later() -> None:
    later = {line.removeprefix("later ") for line in CONTRACT if line.startswith("later ")}

    assert not later & shipped()


def test_names_follow_prometheus() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"headroom_[a-z0-9_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is MetricType.COUNTER), metric.name
        assert len(metric.labels) <= 4
        assert "pid" not in metric.labels
        assert metric.help.endswith(".")
        assert not re.search(r"percent|_mb$|_mib$|_ms$", metric.name)


def test_every_metric_has_a_name_of_its_own() -> None:
    names = [metric.name for metric in METRICS]

    assert len(names) == len(set(names))
