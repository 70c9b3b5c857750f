"""Every component and every recipe on the API server, which refuses what it does not know; nothing is created."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.assets.kubernetes.pods import pods
from tests.assets.kubernetes.rendering import COMPONENTS, DEPLOY, Document, documents
from tests.cluster.cluster import IS_OWN_CLUSTER, kubectl

pytestmark = pytest.mark.cluster

RECIPES: Final = sorted(path.parent for path in (DEPLOY / "recipes").glob("*/kustomization.yaml"))
EXAMPLES: Final = sorted(path.parent for path in DEPLOY.glob("example*/kustomization.yaml"))
BY_RECIPES: Final = {"template", "custom-resource"}
"""The components for pods of custom resources, which the recipes for these use."""

LISTED_BEFORE: Final = {
    "sidecar": (),
    "sidecar-plain": (),
    "pod": (),
    "node": (),
    "node-cgroups": ("node",),
    "snapshot": ("sidecar", "probe"),
    "runbook-links": ("prometheusrule",),
    "dashboard-links": ("prometheusrule",),
}
"""What a component needs before itself; where it is not here, the sidecar."""

ADDRESSES: Final = {
    "name": "vllm-headroom-addresses",
    "literals": ["runbooks=https://git.example/alerts/runbooks", "grafana=https://grafana.example"],
    "options": {"annotations": {"config.kubernetes.io/local-config": "true"}},
}
WITHOUT_DEFINITION: Final = {"PodMonitoring", "StormService"}
"""Kinds of a cloud or a project whose definitions no Go module has that can be had: their pods are applied alone."""

NEEDS_PRIVILEGES: Final = {"gpu-amd", "node", "node-cgroups"}
"""Components whose sidecar a namespace refuses that enforces the pod security standard "restricted"."""

CLUSTER_KINDS: Final = {"Namespace", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}


@pytest.fixture(scope="module")
def namespace() -> Iterator[str]:
    """Yield a namespace that warns of each pod that is not "restricted"."""
    name = f"headroom-{uuid.uuid4().hex[:4]}-manifests"
    kubectl("create", "namespace", name)
    kubectl("label", "namespace", name, "pod-security.kubernetes.io/warn=restricted")
    yield name
    kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="module")
def kinds() -> set[str]:
    """Return the kinds that the API server has."""
    rows = kubectl("api-resources", "--no-headers").splitlines()
    return {row.split()[-1] for row in rows}


def write_kustomization(folder: Path, components: list[str]) -> Path:
    """Write what puts components onto the example's vLLM; return the folder."""
    folder.mkdir()
    content = {
        "namespace": "vllm",
        "resources": [os.path.relpath(DEPLOY / "example" / "vllm", folder)],
        "components": [os.path.relpath(COMPONENTS / component, folder) for component in components],
        "configMapGenerator": [ADDRESSES],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return folder


def dry_run(folder: Path, namespace: str, kinds: set[str]) -> tuple[str, set[str]]:
    """Apply a folder on the API server as a dry run; return what kubectl reports, and the kinds that it does not have.

    Of a kind that it does not have, the pods are applied.
    """
    items: list[Document] = []
    unknown = set()
    for document in documents(kubectl("kustomize", str(folder))):
        if document["kind"] not in CLUSTER_KINDS:
            document["metadata"]["namespace"] = namespace
        if document["kind"] in kinds:
            items.append(document)
            continue
        unknown.add(document["kind"])
        for number, (labels, spec) in enumerate(pods(document["spec"])):
            name = f"{document['metadata']['name']}-{number}"
            metadata = {"name": name, "namespace": namespace, "labels": labels}
            items.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    return kubectl("apply", "--server-side", "--dry-run=server", "--filename=-", input_text=text), unknown


def warns_of_sidecar(report: str) -> bool:
    return any(re.search(r'container "headroom"|hostPID', line) for line in report.splitlines() if "Warning" in line)


def test_every_component_is_accepted(
    tmp_path: Path, namespace: str, kinds: set[str], subtests: pytest.Subtests
) -> None:
    names = {path.parent.name for path in COMPONENTS.glob("*/kustomization.yaml")} - BY_RECIPES
    for name in sorted(names):
        with subtests.test(name):
            ways: list[tuple[str, ...]] = [LISTED_BEFORE.get(name, ("sidecar",))]
            if name not in LISTED_BEFORE:
                ways.append(("sidecar-plain",))
            for number, way in enumerate(ways):
                folder = write_kustomization(tmp_path / f"{name}-{number}", [*way, name])
                report, unknown = dry_run(folder, namespace, kinds)

                assert unknown <= WITHOUT_DEFINITION or not IS_OWN_CLUSTER
                assert "deployment.apps/vllm serverside-applied (server dry run)" in report
                assert warns_of_sidecar(report) == (name in NEEDS_PRIVILEGES), report


def test_every_recipe_and_example_is_accepted(namespace: str, kinds: set[str], subtests: pytest.Subtests) -> None:
    missing: set[str] = set()
    for folder in [*RECIPES, *EXAMPLES]:
        with subtests.test(folder.name):
            report, unknown = dry_run(folder, namespace, kinds)
            missing |= unknown

            assert "serverside-applied (server dry run)" in report
    print(f"the API server has no {', '.join(sorted(missing))}: their pods were applied")  # noqa: T201 - the result
    if IS_OWN_CLUSTER:
        assert missing == WITHOUT_DEFINITION


def test_a_field_that_a_definition_does_not_have_is_refused(namespace: str, kinds: set[str]) -> None:
    """Else the others would say nothing."""
    for path in (COMPONENTS / "keda" / "scaledobject.yaml", COMPONENTS / "podmonitor" / "podmonitor.yaml"):
        (document,) = documents(path.read_text())
        if document["kind"] not in kinds:
            continue
        spoiled: dict[str, Any] = document | {"spec": document["spec"] | {"notAField": 1}}
        spoiled["metadata"]["namespace"] = namespace
        report = kubectl(
            "apply", "--server-side", "--dry-run=server", "--filename=-", input_text=json.dumps(spoiled), check=False
        )

        assert "notAField" in report
