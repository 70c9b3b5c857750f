"""Helm on a real API server: both charts in two namespaces, installed, upgraded, tested, rolled back and removed."""

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
from tests.cluster.cluster import FOLDER, NODE, ROOT, SIDECAR_IMAGE, START_SECONDS, kubectl, read

HELMS: Final = [name for name in ("helm", "helm4") if (FOLDER / name).exists()]
"""The versions that tests/cluster/setup.sh has built, or found."""

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not HELMS, reason="tests/cluster/setup.sh found no helm"),
]

LINKED: Final = ("alerts", "dashboards")
"""Folders into which files of a chart are links."""

KINDS: Final = "deployments,daemonsets,podmonitors,prometheusrules,networkpolicies,roles,rolebindings"
IMAGE: Final = dict(zip(("repository", "tag"), SIDECAR_IMAGE.rsplit(":", 1), strict=True))
ENGINE: Final = {"sidecar": {"evict": "on", "image": IMAGE}, "networkPolicy": {"enabled": True}}
CHANGED_ENGINE: Final = {"sidecar": {"evict": "dry-run", "image": IMAGE, "resources": {"limits": {"memory": "256Mi"}}}}
NODE_MODE: Final = {"mode": "node", "sidecar": {"image": IMAGE}}
CHANGED_NODE_MODE: Final = NODE_MODE | {"podMonitor": {"interval": "30s"}}
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


def write_earlier(chart: Path, folder: Path) -> Path:
    """Write a chart as it was before its newest commit, and return its folder; the chart itself where no history is."""
    path = chart.relative_to(ROOT)
    log = ("git", "-C", str(ROOT), "log", "--max-count=2", "--format=%H", "--", str(path))
    commits = subprocess.run(log, capture_output=True, text=True, check=False).stdout.split()
    if len(commits) < 2:
        return chart
    folder.mkdir()
    archive = subprocess.run(
        ("git", "-C", str(ROOT), "archive", commits[1], str(path), *LINKED), capture_output=True, check=True
    ).stdout
    subprocess.run(("tar", "-x", "-C", str(folder)), input=archive, check=True)
    return folder / path


def run_helm(helm: str, namespace: str, *words: str, values: dict[str, Any] | None = None) -> None:
    """Run a command of Helm, with values on its standard input where it takes some."""
    config = os.environ.get("KUBECONFIG", str(NODE / "admin.conf"))
    options = [] if values is None else ["--values=-"]
    done = subprocess.run(
        [FOLDER / helm, "--kubeconfig", config, "--namespace", namespace, *words, *options],
        input=json.dumps(values),
        capture_output=True,
        text=True,
        check=False,
        timeout=START_SECONDS,
    )
    assert done.returncode == 0, f"helm {' '.join(words)}\n{done.stdout}{done.stderr}"


def list_objects(namespace: str) -> dict[str, Any]:
    """Return what Helm installed in a namespace, by kind and name, without what the API server adds."""
    objects = read(KINDS, "--namespace", namespace)["items"]
    return {
        f"{installed['kind']}/{installed['metadata']['name']}": installed.get("spec", installed.get("rules"))
        for installed in objects
    }


@pytest.mark.parametrize("helm", HELMS)
def test_a_release_is_installed_upgraded_tested_rolled_back_and_removed_and_its_neighbour_stays(
    tmp_path: Path, namespaces: tuple[str, str], helm: str
) -> None:
    earlier_node = write_earlier(CHART, tmp_path / "earlier-node")
    earlier_cluster = write_earlier(CLUSTER, tmp_path / "earlier-cluster")
    # The chart before an upgrade, the one after it, and the values of each.
    charts: dict[str, tuple[Path, Path, dict[str, Any], dict[str, Any]]] = {
        "engine": (
            parent(tmp_path / "earlier-engine", chart=earlier_node),
            parent(tmp_path / "engine"),
            {"vllm-headroom": ENGINE},
            {"vllm-headroom": CHANGED_ENGINE},
        ),
        "node": (earlier_node, CHART, NODE_MODE, CHANGED_NODE_MODE),
        "cluster": (earlier_cluster, CLUSTER, {}, RINGING),
    }
    for namespace in namespaces:
        for release, (chart, _, values, _) in charts.items():
            run_helm(helm, namespace, "install", release, str(chart), values=values)
    own, other_namespace = namespaces
    installed = list_objects(own)
    neighbour = list_objects(other_namespace)
    assert installed.keys() == neighbour.keys()
    assert {key.partition("/")[0] for key in installed} >= {"Deployment", "DaemonSet", "PodMonitor", "PrometheusRule"}

    for release, (_, chart, _, changed_values) in charts.items():
        run_helm(helm, own, "upgrade", release, str(chart), values=changed_values)
    assert list_objects(own) != installed
    for release in ("engine", "node"):
        run_helm(helm, own, "test", release, f"--timeout={START_SECONDS:g}s")

    for release in charts:
        run_helm(helm, own, "rollback", release)
    assert list_objects(own) == installed

    for release in charts:
        run_helm(helm, own, "uninstall", release)
    assert list_objects(own) == {}
    assert list_objects(other_namespace) == neighbour
