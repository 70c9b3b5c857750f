"""Your names of the severities: the rules, the Alertmanager configuration, the chart and the mixin map them alike."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from alerts.generate import main
from tests.assets.kubernetes import helm
from tests.assets.kubernetes.rendering import documents, find
from tests.assets.situations import matches
from tests.assets.test_alertmanager import amtool
from tests.assets.test_mixin import NAME, evaluate

NAMES: Final = {"page": "critical", "critical": "warning"}
OPTION: Final = ("--severity", "page=critical,critical=warning")
RULES: Final = yaml.safe_load((Path(__file__).parents[2] / "alerts/rules/headroom.yaml").read_text(encoding="utf-8"))
SHIPPED: Final = {
    rule["alert"]: rule["labels"] for group in RULES["groups"] for rule in group["rules"] if "alert" in rule
}
MAPPED: Final = {name: NAMES.get(labels["severity"], labels["severity"]) for name, labels in SHIPPED.items()}


def generate(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(arguments)
    return capsys.readouterr().out


def severities(groups: list[dict[str, Any]]) -> dict[str, str]:
    return {rule["alert"]: rule["labels"]["severity"] for group in groups for rule in group["rules"] if "alert" in rule}


def test_the_rules_have_your_names(capsys: pytest.CaptureFixture[str]) -> None:
    text = generate(capsys, *OPTION, "--format", "rules")

    assert severities(yaml.safe_load(text)["groups"]) == MAPPED
    assert "# severity  critical  act within the hour\n#           warning   act today\n" in text


def test_the_chart_and_the_mixin_have_the_same_names() -> None:
    chart = helm.render(helm.CLUSTER, {"prometheusRule": {"severities": NAMES}})
    mixin = evaluate(f"(import '{NAME}/deploy/mixin/mixin.libsonnet') {{ _config+:: {{ severities: {NAMES} }} }}")

    assert severities(find(documents(chart), "PrometheusRule")["spec"]["groups"]) == MAPPED
    assert severities(mixin["a"]["groups"]) == MAPPED


def muted_pairs(configuration: dict[str, Any], names: dict[str, str]) -> set[tuple[str, str]]:
    """Return each alert with one that it mutes, both on one GPU of one engine."""
    labels = {
        name: {"alertname": name, "area": shipped["area"], "severity": names[name]} | ({"gpu": "0"})
        for name, shipped in SHIPPED.items()
        if shipped["area"] == "memory"
    }
    return {
        (source, target)
        for rule in configuration["inhibit_rules"]
        for source in labels
        for target in labels
        if matches(rule["source_matchers"], labels[source]) and matches(rule["target_matchers"], labels[target])
    }


def test_the_same_alerts_mute_each_other_under_your_names(capsys: pytest.CaptureFixture[str]) -> None:
    shipped = yaml.safe_load(generate(capsys, "--format", "alertmanager"))
    mapped = yaml.safe_load(generate(capsys, *OPTION, "--format", "alertmanager"))
    muted_before = muted_pairs(shipped, {name: labels["severity"] for name, labels in SHIPPED.items()})

    assert muted_before
    assert muted_pairs(mapped, MAPPED) == muted_before


def test_only_what_was_a_page_rings(capsys: pytest.CaptureFixture[str]) -> None:
    mapped = yaml.safe_load(generate(capsys, *OPTION, "--format", "alertmanager"))
    (pagerduty,) = mapped["receivers"][1]["pagerduty_configs"]
    (headroom,) = mapped["route"]["routes"]

    assert pagerduty["severity"] == '{{ if eq .GroupLabels.severity "critical" }}critical{{ else }}warning{{ end }}'
    assert {"matchers": ['severity="critical"'], "repeat_interval": "30m"} in headroom["routes"]


@pytest.mark.parametrize(("names", "is_sent"), [("info=warning", True), ("info=none", False)])
def test_an_info_is_sent_where_it_is_called_as_what_is_sent(
    names: str, capsys: pytest.CaptureFixture[str], *, is_sent: bool
) -> None:
    mapped = yaml.safe_load(generate(capsys, "--severity", names, "--format", "alertmanager"))
    (headroom,) = mapped["route"]["routes"]
    routed_to_nobody = [route["matchers"] for route in headroom["routes"] if route.get("receiver") == "nobody"]

    assert routed_to_nobody == ([] if is_sent else [['severity="none"']])


@pytest.mark.skipif(shutil.which("amtool") is None, reason="amtool is not installed")
def test_alertmanager_takes_the_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "alertmanager.yml"
    file.write_text(generate(capsys, *OPTION, "--format", "alertmanager"))
    checked = amtool("check-config", str(file))

    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("page=critical", "page and critical would both be 'critical', so both would ring: map critical too"),
        ("warning=page", "page and warning would both be 'page'"),
        ("urgent=page", "'urgent=page' maps no severity"),
        ("page=critical,page=error,critical=warning", "'page=error' maps no severity"),
        ("page", "'page' maps no severity"),
        ("page=Very bad", "'page=Very bad' maps no severity"),
    ],
)
def test_a_map_that_cannot_be_is_refused_in_one_line(
    names: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--severity", names])

    error = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert message in error
    assert error.count("\n") == 1


def test_names_reach_alerts_whose_values_are_yours_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text("HeadroomGpuHot: {severity: page}\n")

    text = generate(capsys, *OPTION, "--format", "rules", "--values", str(values))

    assert severities(yaml.safe_load(text)["groups"]) == MAPPED | {"HeadroomGpuHot": "critical"}


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        ("{alert: A, expr: up}", ("rules",), "A needs the labels area and severity"),
        ("{alert: A, expr: up, labels: {severity: page}}", ("alertmanager",), "A needs the labels area and severity"),
        (
            "{alert: A, expr: up, labels: {severity: bad, area: gpu}}",
            ("rules",),
            "one of page, critical, warning, info",
        ),
        ("{alert: A, expr: up, labels: {'severity': 'page', area: gpu}}", ("rules",), "--severity cannot map them"),
        ("{alert: A, expr: up, labels: {severity: page, area: gpu}}", ("patch-runbooks",), "writes no severities"),
    ],
)
def test_rules_whose_severities_cannot_be_mapped_are_refused_in_one_line(
    rule: str, options: tuple[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(f"groups:\n- name: mine\n  rules:\n  - {rule}\n")

    with pytest.raises(SystemExit) as exit_info:
        main(["--rules", str(rules), *OPTION, "--format", *options])

    error = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert message in error
    assert error.count("\n") == 1


def test_an_inhibition_between_severities_that_no_memory_alert_has_is_left_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("groups:\n- name: mine\n  rules:\n  - {alert: A, expr: up, labels: {severity: page, area: gpu}}\n")

    assert '=~""' not in generate(capsys, "--rules", str(rules), *OPTION, "--format", "alertmanager")


def test_the_chart_refuses_a_page_that_is_no_other() -> None:
    wrong = {"prometheusRule": {"severities": {"page": "critical"}}}

    assert "page and critical would be the same" in helm.refusal(helm.CLUSTER, wrong)
