"""What deploy/README.md and docs/kubernetes.md say to write builds, and what they name is there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.assets.kubernetes import schemas
from tests.assets.kubernetes.rendering import (
    COMPONENTS,
    HERE,
    REPOSITORY,
    Document,
    documents,
    find,
    needs_kustomize,
    rendered,
)

DEPLOY: Final = REPOSITORY / "deploy"
README: Final = (DEPLOY / "README.md").read_text(encoding="utf-8")
STEPS: Final = (REPOSITORY / "docs" / "kubernetes.md").read_text(encoding="utf-8")
REMOTE: Final = re.compile(r"https://github\.com/vllm-headroom/vllm-headroom//(deploy/[\w/-]+)\?ref=v([\d.]+)")


def written() -> dict[str, Any]:
    """Return the page's kustomization, with this repository in place of the one on the web."""
    (block,) = re.findall(r"```yaml\n(namespace: .*?)```", STEPS, re.DOTALL)
    content: dict[str, Any] = yaml.safe_load(block)
    return content


@needs_kustomize
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not on the PATH: the label is not put on")
def test_the_kustomization_of_the_page_builds(tmp_path: Path) -> None:
    vllm = HERE / "workloads" / "init-containers" / "deployment.yaml"
    label = ["kubectl", "label", "--local", "--filename", str(vllm), "vllm-headroom=enabled", "--output", "yaml"]
    assert " ".join(label).replace(str(vllm), "vllm.yaml") + " > labelled.yaml" in STEPS
    labelled = subprocess.run(label, capture_output=True, text=True, check=True)

    manifests = built(tmp_path, yaml.safe_load(labelled.stdout))

    headroom, *other_containers = find(manifests, "Deployment")["spec"]["template"]["spec"]["initContainers"]
    assert headroom["image"] == "registry.your.org/vllm-headroom:0.1.0"
    assert {"name": "HEADROOM_ENGINE_URL", "value": "http://127.0.0.1:8001/metrics"} in headroom["env"]
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"} in headroom["env"]
    assert [container["name"] for container in other_containers] == ["wait", "download"]
    assert [fault for manifest in manifests for fault in schemas.faults(manifest, "1.29")] == []


def built(folder: Path, workload: Document) -> list[Document]:
    """Return what the page's kustomization makes of a labelled workload."""
    (folder / "labelled.yaml").write_text(yaml.safe_dump(workload))
    here = os.path.relpath(REPOSITORY, folder)
    (folder / "kustomization.yaml").write_text(
        REMOTE.sub(lambda match: f"{here}/{match[1]}", yaml.safe_dump(written()))
    )
    return documents(rendered(folder))


@needs_kustomize
@pytest.mark.parametrize("namespace", [None, "vllm", "elsewhere"])
def test_the_monitor_of_the_page_is_where_it_selects_the_pods(tmp_path: Path, namespace: str | None) -> None:
    workload = yaml.safe_load((HERE / "workloads" / "init-containers" / "deployment.yaml").read_text())
    workload["metadata"] |= {"labels": {"vllm-headroom": "enabled"}} | ({"namespace": namespace} if namespace else {})
    manifests = built(tmp_path, workload)
    monitor, deployment = find(manifests, "PodMonitor"), find(manifests, "Deployment")
    template = deployment["spec"]["template"]

    assert monitor["metadata"]["namespace"] == deployment["metadata"]["namespace"] == "vllm"
    assert "namespaceSelector" not in monitor["spec"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


@needs_kustomize
def test_the_links_of_the_page_build(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(configMapGenerator:\n.*?)```", README, re.DOTALL)
    here = os.path.relpath(REPOSITORY, tmp_path)
    (tmp_path / "kustomization.yaml").write_text(REMOTE.sub(lambda match: f"{here}/{match[1]}", block))

    text = rendered(tmp_path)

    assert (
        "runbook_url: https://git.your.org/vllm-headroom/blob/main/alerts/runbooks/HeadroomGpuMemoryLeak.md\n" in text
    )
    assert "dashboard_url: https://grafana.your.org/d/" in text
    assert [document["kind"] for document in documents(text)] == ["PrometheusRule"]


def test_what_is_named_is_there() -> None:
    named = set(
        re.findall(
            r"`((?:gpu|sidecar)(?:-[a-z]+)*|podmonitor|prometheusrule|dashboards|keda|hpa|networkpolicy|label-check|openshift|template|custom-resource|memory-limit|probe|snapshot|evict|engine-log|node(?:-cgroups|-evict|-probe)?|[a-z]+-links)`",
            README,
        )
    )
    there = {path.parent.name for path in COMPONENTS.glob("*/kustomization.yaml")}
    links = re.findall(r"\]\(([\w./-]+)\)", README)

    assert named | {"pod"} == there
    assert [link for link in links if not (DEPLOY / link).exists()] == []


def test_the_page_is_of_this_version() -> None:
    (version,) = {match[1] for match in REMOTE.findall(README + STEPS)}
    chart = yaml.safe_load((DEPLOY / "helm" / "vllm-headroom" / "Chart.yaml").read_text())
    container = yaml.safe_load((COMPONENTS / "sidecar" / "patch.yaml").read_text())
    image = container["spec"]["template"]["spec"]["initContainers"][0]["image"]

    assert version == chart["version"] == image.rpartition(":")[2]
