"""Alerts of engines that one daemon watches: each as with its own sidecar, though all have the daemon's instance."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.assets import alerts, promql

OF_THE_DAEMON: Final = re.compile(
    r'(up|headroom_build_info|headroom_sample_age_seconds|headroom_web_config\w*|process_\w+|\w+\{.*source="nvml")\b'
)
"""Series that are not an engine's."""

OF_KUBERNETES: Final = re.compile(r"kube_\w+")
NODE: Final = "node:9839"
"""The instance of the daemon, in place of that of each engine's sidecar."""

TWIN: Final = "-twin"
"""What the names of a second engine of the node end in, to which everything happens too."""


def build_known() -> promql.Vocabulary:
    """Return the labels of each metric on the node, where those of an engine have its container."""
    metric_labels = {
        metric: labels | {"container"} if metric.startswith("headroom_") else labels
        for metric, labels in promql.vocabulary().items()
    }
    for name, expr in promql.recorded():
        metric_labels[name] = promql.labels(promql.parsed(expr), metric_labels)[0] or frozenset()
    return metric_labels


KNOWN: Final = build_known()
KEPT_LABELS: Final = {
    rule.name: promql.labels(promql.parsed(rule.expr), KNOWN)[0] or frozenset()
    for rule in alerts.rules()
    if rule.is_alert
}
AREAS: Final = ("engine", "memory", "gpu")
OF_MANY: Final = {"HeadroomModelDown", "HeadroomReplicasLost", "HeadroomModelCrashLoop"}
"""Alerts on a model, which count its engines."""

ALERTS: Final = frozenset(
    rule.name for rule in alerts.rules() if rule.is_alert and rule.labels.get("area") in AREAS
).difference(OF_MANY)
FILES: Final = tuple(path for path in alerts.TESTS if any(name in path.read_text() for name in ALERTS))


def move_to_node(series: str, twin: str) -> str | None:
    """Return a series as the node's daemon exports it, or that of a second engine there; None without one."""
    if OF_THE_DAEMON.match(series) or "pod=" not in series:
        return None if twin else series
    series = re.sub(r'\b(pod|uid|uuid)="([^"]+)"', rf'\1="\2{twin}"', series)
    if OF_KUBERNETES.match(series):
        return series
    series = re.sub(r'instance="[^"]*"', f'instance="{NODE}"', series)
    return series.replace("{", '{container="vllm",', 1)


def move_alert(alert: dict[str, Any], name: str, twin: str) -> dict[str, Any]:
    """Return an alert that a test expects as it is on the node, or that of the second engine there."""
    alert = copy.deepcopy(alert)
    labels = alert["exp_labels"]
    # The texts name the pod as NAMESPACE/POD, and in the command that shows its log.
    namespace = labels.get("namespace", "")
    names = [re.escape(start + labels["pod"]) for start in (f"{namespace}/", f"-n {namespace} ")]
    pattern = rf"({'|'.join(names)})\b"
    if "uuid" in labels:
        pattern += rf"|\b({re.escape(labels['uuid'])})\b"
    for key, text in (alert.get("exp_annotations") or {}).items():
        alert["exp_annotations"][key] = re.sub(pattern, rf"\g<0>{twin}", text)
    for label in {"pod", "uuid"} & labels.keys():
        labels[label] += twin
    if "instance" in labels:
        labels["instance"] = NODE
    if "container" in KEPT_LABELS[name]:
        labels["container"] = "vllm"
    return alert


def move_test(test: dict[str, Any]) -> None:
    """Change a test so that a node's daemon watches its engines, and a second one of each."""
    test.pop("promql_expr_test", None)
    inputs = []
    for entry in test["input_series"]:
        for twin in ("", TWIN):
            series = move_to_node(entry["series"], twin)
            if series is not None:
                inputs.append({**entry, "series": series})
    test["input_series"] = inputs
    test["alert_rule_test"] = [check for check in test.get("alert_rule_test", ()) if check["alertname"] in ALERTS]
    for check in test["alert_rule_test"]:
        moved = []
        for alert in check.get("exp_alerts") or ():
            # On bare metal an engine has no pod, and the instance names it.
            twins = ("", TWIN) if "pod" in alert["exp_labels"] else ()
            moved += [move_alert(alert, check["alertname"], twin) for twin in twins] or [alert]
        check["exp_alerts"] = moved


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_two_engines_of_a_node_have_the_alerts_that_each_has_with_its_own_sidecar(path: Path, tmp_path: Path) -> None:
    document = promql.read_yaml(path.read_text(encoding="utf-8"))
    for test in document["tests"]:
        move_test(test)
    file = tmp_path / path.name
    file.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")

    done = subprocess.run(
        ["promtool", "test", "rules", *map(str, alerts.narrowed(file, tmp_path))],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_a_text_asks_for_its_own_engine_among_those_with_the_same_instance() -> None:
    queries = {
        query
        for rule in alerts.rules()
        for text in rule.annotations.values()
        for query in alerts.template_queries(text)
    }
    labels = {
        query for rule in alerts.rules() for text in rule.labels.values() for query in alerts.template_queries(text)
    }

    mixed = [
        selector
        for query in queries | labels
        for selector in re.findall(r"\{[^{}]*\}", query)
        if "instance=" in selector and not ("pod=" in selector and "namespace=" in selector)
    ]
    assert mixed == []
