"""Alerts of engines that one daemon watches: each as with its own sidecar, though all have the daemon's instance."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

ROOT: Final = Path(__file__).parents[2]
OF_THE_DAEMON: Final = re.compile(
    r'(up|headroom_build_info|headroom_sample_age_seconds|kube_\w+|\w+\{.*source="nvml")\b'
)
"""Series that are not an engine's."""


def move_to_node(series: str, twin: str) -> str | None:
    """Return a series as the node's daemon exports it, or that of a second engine there; None without one."""
    if OF_THE_DAEMON.match(series) or "pod=" not in series:
        return None if twin else series
    series = re.sub(r'instance="[^"]*"', 'instance="node:9839"', series)
    series = re.sub(r'(pod|uuid)="([^"]+)"', rf'\1="\2{twin}"', series)
    return series.replace("{", '{container="vllm",', 1)


def count_firing(test: dict[str, Any], pods: set[str]) -> list[dict[str, Any]]:
    """Return what promtool expects: as many alerts of each pod, and of its twin, as the test has of the pod."""
    expected = []
    for alert in test.pop("alert_rule_test", ()):
        for pod in sorted(pods):
            count = sum(each["exp_labels"].get("pod") == pod for each in alert.get("exp_alerts") or ())
            expected += [
                {
                    "expr": f'count(ALERTS{{alertname="{alert["alertname"]}",alertstate="firing",pod="{name}"}})'
                    " or vector(0)",
                    "eval_time": alert["eval_time"],
                    "exp_samples": [{"labels": "{}", "value": count}],
                }
                for name in (pod, f"{pod}-twin")
            ]
    return expected


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
@pytest.mark.parametrize("name", ["allocator_test", "memory_leak_test"])
def test_two_engines_of_a_node_have_the_alerts_that_each_has_with_its_own_sidecar(name: str, tmp_path: Path) -> None:
    document = yaml.safe_load((ROOT / "alerts" / "tests" / f"{name}.yaml").read_text(encoding="utf-8"))
    document["rule_files"] = [str(ROOT / "alerts" / "rules" / "headroom.yaml")]
    checks = 0
    for test in document["tests"]:
        pods = set()
        inputs = []
        for entry in test["input_series"]:
            pods |= set(re.findall(r'\bpod="([^"]+)"', entry["series"]))
            for twin in ("", "-twin"):
                series = move_to_node(entry["series"], twin)
                if series is not None:
                    inputs.append({**entry, "series": series})
        test["input_series"] = inputs
        test["promql_expr_test"] = count_firing(test, pods)
        checks += len(test["promql_expr_test"])
    (tmp_path / "node.yaml").write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")

    done = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "node.yaml")], capture_output=True, text=True, check=False
    )

    assert checks
    assert done.returncode == 0, done.stdout + done.stderr
