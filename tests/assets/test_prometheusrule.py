"""The rules for the operator, and with an operator's hosts in them, are the rules."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from alerts.generate import BOARD, PATCHES, RUNBOOKS_URL, with_links
from tests.assets.promql import read_yaml
from tests.conftest import Golden
from vllm_headroom import config

ALERTS: Final = Path(__file__).parents[2] / "alerts"
RULES: Final = ALERTS / "rules" / "headroom.yaml"
DURATION: Final = re.compile(r"(\d+d)?(\d+h)?(\d+m)?(\d+s)?")


def generate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ALERTS / "generate.py"), *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        timeout=60,
    )


def printed(*arguments: str) -> str:
    process = generate(*arguments)
    assert (process.returncode, process.stderr) == (0, "")
    return process.stdout


def loaded(text: str) -> dict[str, Any]:
    document = read_yaml(text)
    assert isinstance(document, dict)
    return document


def test_the_committed_rule_is_what_the_program_prints(golden: Golden) -> None:
    golden(ALERTS / "prometheusrule.yaml", printed())


@pytest.mark.parametrize("form", PATCHES)
def test_the_patches_of_the_components_are_what_the_program_prints(golden: Golden, form: str) -> None:
    folder = {"patch-runbooks": "runbook-links", "patch-dashboards": "dashboard-links"}[form]

    golden(ALERTS.parent / "deploy" / "kubernetes" / "components" / folder / "patch.yaml", printed("--format", form))


def test_the_rule_says_what_the_rules_say() -> None:
    rule = loaded(printed())

    spec = rule.pop("spec")
    linked = loaded(with_links(RULES.read_text(encoding="utf-8"), runbooks=RUNBOOKS_URL, dashboards=None))
    assert spec == linked
    assert rule == {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "vllm-headroom", "labels": {"release": "kube-prometheus-stack"}},
    }


def test_the_rules_use_only_what_the_operator_knows() -> None:
    groups = loaded(printed())["spec"]["groups"]

    assert len({group["name"] for group in groups}) == len(groups), "the operator tells groups apart by their names"
    for group in groups:
        assert group.keys() == {"name", "rules"}
        for rule in group["rules"]:
            rule_keys = {"alert", "expr", "for", "keep_firing_for", "labels", "annotations"}
            assert rule.keys() <= (rule_keys if "alert" in rule else {"record", "expr", "labels"})
            texts = {**rule.get("labels", {}), **rule.get("annotations", {}), "expr": rule["expr"]}
            assert all(isinstance(text, str) for text in texts.values())
            assert all(DURATION.fullmatch(rule.get(name, "1m")) for name in ("for", "keep_firing_for"))


def test_labels_and_names_are_put_in() -> None:
    rule = loaded(
        printed("--label", "prometheus=k8s", "--label", "example.com/on=true", "--name", "gpu", "--namespace", "123")
    )

    assert rule["metadata"] == {
        "name": "gpu",
        "namespace": "123",
        "labels": {"prometheus": "k8s", "example.com/on": "true"},
    }


def links(*arguments: str, name: str) -> dict[str, str | None]:
    """Return each alert's link of this name."""
    rules = [rule for group in loaded(printed("--format", "rules", *arguments))["groups"] for rule in group["rules"]]
    return {rule["alert"]: rule["annotations"].get(name) for rule in rules if "alert" in rule}


@pytest.mark.parametrize(
    ("url", "runbook"),
    [
        ("https://docs.your.org/gpu/", "https://docs.your.org/gpu/{alert}"),
        ("https://git.your.org/blob/main/runbooks/{alert}.md", "https://git.your.org/blob/main/runbooks/{alert}.md"),
    ],
)
def test_each_alert_leads_to_its_runbook(url: str, runbook: str) -> None:
    alert_links = links("--runbooks-url", url, name="runbook_url")

    assert alert_links == {alert: runbook.replace("{alert}", alert) for alert in alert_links}
    assert f'labels: {{address: "{runbook}"}}\n' in printed("--runbooks-url", url), "the boards ask for it"
    assert set(links("--runbooks-url", url, name="dashboard_url").values()) == {None}


def test_each_alert_leads_to_the_board_of_its_engine() -> None:
    arguments = ("--dashboards-url", "http://[::1]:3000/grafana")

    assert set(links(*arguments, name="dashboard_url").values()) == {f"http://[::1]:3000/grafana{BOARD}"}


def test_every_alert_leads_to_a_runbook_that_there_is_without_any_option() -> None:
    files = {alert: f"{alert}.md" for alert in links(name="runbook_url")}
    folder, _, file = RUNBOOKS_URL.rpartition("/")

    assert folder.endswith("/blob/main/alerts/runbooks")
    assert file == "{alert}.md"
    assert links(name="runbook_url") == {alert: f"{folder}/{files[alert]}" for alert in files}
    assert [name for name in files.values() if not (ALERTS / "runbooks" / name).is_file()] == []
    assert set(links(name="dashboard_url").values()) == {None}


def test_rules_page_and_chart_lead_to_the_same_runbooks() -> None:
    values = loaded((ALERTS.parent / "deploy/helm/vllm-headroom-cluster/values.yaml").read_text(encoding="utf-8"))

    assert values["addresses"]["runbooks"] == RUNBOOKS_URL
    assert config.RUNBOOKS_URL == RUNBOOKS_URL


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus")
def test_prometheus_takes_rules_with_hosts_in_them(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(printed("--format", "rules", "--runbooks-url", "https://a.b/%7Eops/{alert}.md"), encoding="utf-8")

    checked = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True, check=False)

    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--label", "release"),
            "argument --label: 'release' is no label: write it like release=kube-prometheus-stack",
        ),
        (("--label", "=x"), "argument --label: '=x' is no label: write it like release=kube-prometheus-stack"),
        (
            ("--label", "release=a b"),
            "argument --label: 'a b' is no label's value: 63 letters, digits, '-', '_' or '.' at most",
        ),
        (
            ("--name", "Headroom"),
            "argument --name: 'Headroom' is no name for a Kubernetes object: write it like vllm-headroom",
        ),
        (
            ("--dashboards-url", "grafana.your.org"),
            "argument --dashboards-url: 'grafana.your.org' is no base of addresses: write it like https://grafana.your.org",
        ),
        (
            ("--runbooks-url", "https://a/{{ $x }}"),
            "argument --runbooks-url: 'https://a/{{ $x }}' is no base of addresses",
        ),
        (("--format", "json"), "argument --format: invalid choice: 'json'"),
        (("--rules", os.devnull), f"cannot take rules from {os.devnull}: it holds no groups of rules"),
        (("--rules", "missing.yaml"), "cannot take rules from missing.yaml: [Errno 2] No such file or directory"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    process = generate(*arguments)

    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.startswith(f"generate.py: {message}")
    assert process.stderr.count("\n") == 1


def test_rules_of_your_own_may_be_a_marked_document(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(f"---\n{RULES.read_text(encoding='utf-8')}...\n", encoding="utf-8")

    assert printed("--rules", str(file)) == printed()


def test_values_replace_thresholds_severities_and_durations(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(
        "HeadroomGpuHot: {celsius: 90, severity: critical, for: 20m}\n"
        "HeadroomQueueBacklog: {enabled: false}\n"
        "HeadroomMemoryDiscrepancy: {enabled: false}\n"
    )
    text = printed("--format", "rules", "--values", str(values), "--runbooks-url", "https://docs.your.org")
    rules = {rule["alert"]: rule for group in loaded(text)["groups"] for rule in group["rules"] if "alert" in rule}
    shipped = [rule for group in loaded(RULES.read_text())["groups"] for rule in group["rules"] if "alert" in rule]

    hot = rules["HeadroomGpuHot"]
    assert "> 90 # celsius" in hot["expr"]
    assert (hot["labels"]["severity"], hot["for"]) == ("critical", "20m")
    assert hot["annotations"]["runbook_url"] == "https://docs.your.org/HeadroomGpuHot"
    assert {rule["alert"] for rule in shipped} - rules.keys() == {"HeadroomQueueBacklog", "HeadroomMemoryDiscrepancy"}


@pytest.mark.parametrize(
    ("wrong", "refusal"),
    [
        (
            "HeadroomGpuHot: {kelvin: 300}",
            "HeadroomGpuHot: has no value kelvin: its values are celsius, for, keep_firing_for, severity, enabled",
        ),
        ("HeadroomGpuHott: {celsius: 1}", "there is no alert HeadroomGpuHott, did you mean HeadroomGpuHot?"),
        ("HeadroomGpuHot: {severity: red}", "severity: got red, accepts page, critical, warning, info"),
        ("HeadroomGpuHot: {for: 5}", "for: got 5, accepts a duration such as 20m"),
        ("HeadroomGpuHot: {celsius: 90C, enabled: 1}", "celsius: got 90C, accepts a number"),
        ("HeadroomGpuHot: {celsius: 90C, enabled: 1}", "enabled: got 1, accepts true or false"),
        ("1", "no mapping of alerts"),
    ],
)
def test_a_value_that_there_is_not_is_refused(wrong: str, refusal: str, tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(wrong)
    process = generate("--values", str(values))

    assert (process.returncode, process.stdout, process.stderr.count("\n")) == (2, "", 1)
    assert refusal in process.stderr
