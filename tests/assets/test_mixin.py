"""The mixin has every rule and every board, and can be changed as its README shows."""

import json
import re
from pathlib import Path
from typing import Any, Final

import _jsonnet  # type: ignore[import-untyped]
import yaml

ROOT: Final = Path(__file__).parents[2]
NAME: Final = "github.com/vllm-headroom/vllm-headroom"
RULES: Final = yaml.safe_load((ROOT / "alerts/rules/headroom.yaml").read_text(encoding="utf-8"))


def find(base: str, name: str) -> tuple[str, bytes]:
    """Return a file as jsonnet-bundler would lay the repository out."""
    path = ROOT / name.removeprefix(f"{NAME}/") if name.startswith(NAME) else Path(base) / name
    return str(path), path.read_bytes()


def evaluate(snippet: str) -> dict[str, Any]:
    shown = f"local m = {{}} + ({snippet}); {{ a: m.prometheusAlerts, r: m.prometheusRules, d: m.grafanaDashboards }}"
    evaluated: dict[str, Any] = json.loads(_jsonnet.evaluate_snippet("", shown, import_callback=find))
    return evaluated


def test_the_mixin_has_every_group_once_and_every_board() -> None:
    mixin = evaluate(f"import '{NAME}/deploy/mixin/mixin.libsonnet'")
    groups = {group["name"]: group for part in ("a", "r") for group in mixin[part]["groups"]}

    assert groups == {group["name"]: group for group in RULES["groups"]}
    assert len(mixin["a"]["groups"]) + len(mixin["r"]["groups"]) == len(groups)
    assert all("alert" not in rule for group in mixin["r"]["groups"] for rule in group["rules"])
    assert mixin["d"] == {
        path.name: json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "dashboards").glob("headroom*.json")
    }


def test_the_example_changes_one_alert() -> None:
    page = (ROOT / "deploy/mixin/README.md").read_text(encoding="utf-8")
    example = re.findall(r"^```jsonnet\n(.*?)^```", page, re.DOTALL | re.MULTILINE)

    changed = evaluate(example[0])["a"]["groups"]
    severities = {
        rule.get("alert"): rule["labels"]["severity"] for g in changed for rule in g["rules"] if "alert" in rule
    }
    severities_before = {
        rule["alert"]: rule["labels"]["severity"] for g in RULES["groups"] for rule in g["rules"] if "alert" in rule
    }
    assert len(example) == 1
    names = {"page": "critical", "critical": "warning"}
    mapped = {alert: names.get(severity, severity) for alert, severity in severities_before.items()}
    assert severities == mapped | {"HeadroomGpuHot": "info"} != severities_before
