"""Helm on a real API server: both charts in two namespaces, installed, upgraded, rolled back and removed."""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.assets.kubernetes.helm import CHART, CLUSTER, parent
from tests.cluster.cluster import FOLDER, NODE, kubectl, read

HELM: Final = FOLDER / "helm"

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not HELM.exists(), reason="tests/cluster/setup.sh found no helm"),
]

KINDS: Final = "deployments,daemonsets,podmonitors,prometheusrules,networkpolicies,roles,rolebindings"
ENGINE: Final = {"sidecar": {"evict": "on"}, "networkPolicy": {"enabled": True}}
CHANGED_ENGINE: Final = {"sidecar": {"evict": "dry-run", "resources": {"limits": {"memory": "256Mi"}}}}
RINGING: Final = {"prometheusRule": {"severities": {"page": "critical", "critical": "warning"}}}


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    run = uuid.uuid4().hex[:4]
    names = (f"headroom-{run}-helm-one", f"headroom-{run}-helm-two")
    for name in names:
        kubectl("create", "namespace", name)
    yield names
    for name in names:
        kubectl("delete", "namespace", name, "--wait=false")


def run_helm(namespace: str, *words: str, values: dict[str, Any] | None = None) -> None:
    """Run a command of Helm, with values on its standard input where it takes some."""
    config = os.environ.get("KUBECONFIG", str(NODE / "admin.conf"))
    options = [] if values is None else ["--values=-"]
    done = subprocess.run(
        [HELM, "--kubeconfig", config, "--namespace", namespace, *words, *options],
        input=json.dumps(values),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, f"helm {' '.join(words)}\n{done.stdout}{done.stderr}"


def list_objects(namespace: str) -> dict[str, Any]:
    """Return what Helm installed in a namespace, by kind and name, without what the API server adds."""
    objects = read(KINDS, "--namespace", namespace)["items"]
    return {f"{each['kind']}/{each['metadata']['name']}": each.get("spec", each.get("rules")) for each in objects}


def test_a_release_is_installed_upgraded_rolled_back_and_removed_and_its_neighbour_stays(
    tmp_path: Path, namespaces: tuple[str, str]
) -> None:
    charts: dict[str, tuple[Path, dict[str, Any], dict[str, Any]]] = {
        "engine": (parent(tmp_path / "engine"), {"vllm-headroom": ENGINE}, {"vllm-headroom": CHANGED_ENGINE}),
        "node": (CHART, {"mode": "node"}, {"mode": "node", "podMonitor": {"interval": "30s"}}),
        "cluster": (CLUSTER, {}, RINGING),
    }
    for namespace in namespaces:
        for release, (chart, values, _) in charts.items():
            run_helm(namespace, "install", release, str(chart), values=values)
    own, other = namespaces
    installed = list_objects(own)
    neighbour = list_objects(other)
    assert installed.keys() == neighbour.keys()
    assert {key.partition("/")[0] for key in installed} >= {"Deployment", "DaemonSet", "PodMonitor", "PrometheusRule"}

    for release, (chart, _, changed_values) in charts.items():
        run_helm(own, "upgrade", release, str(chart), values=changed_values)
    assert list_objects(own) != installed

    for release in charts:
        run_helm(own, "rollback", release)
    assert list_objects(own) == installed

    for release in charts:
        run_helm(own, "uninstall", release)
    assert list_objects(own) == {}
    assert list_objects(other) == neighbour
