"""The chart's probe is the Kustomize component's: by what Helm made of it, and rendered again where it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from tests.assets.kubernetes import helm, schemas
from tests.assets.kubernetes.difference import leaves
from tests.assets.kubernetes.rendering import (
    COMPONENTS,
    HERE,
    documents,
    find,
    kustomization,
    needs_kustomize,
    rendered,
)
from tests.assets.test_helm import write_down
from tests.conftest import Golden

WRITTEN: Final = HERE / "helm-rendered" / "probe.yaml"
VALUES: Final = {"sidecar": {"probe": True}}


def pod() -> dict[str, Any]:
    pod_spec: dict[str, Any] = find(documents(WRITTEN.read_text()), "Deployment")["spec"]["template"]["spec"]
    return pod_spec


def test_what_helm_made_of_it_is_written_down(tmp_path: Path, golden: Golden) -> None:
    write_down(WRITTEN, helm.parent(tmp_path, probe=True), VALUES, golden)


def test_what_is_written_down_is_of_the_chart_as_it_is() -> None:
    assert helm.digest() in WRITTEN.read_text(), "the chart has changed: render it again, as deploy/helm/README.md says"


@needs_kustomize
def test_it_is_what_the_component_adds(tmp_path: Path) -> None:
    components = [COMPONENTS / name for name in ("sidecar", "gpu-runtime-class", "probe")]
    folder = kustomization(tmp_path, resource=HERE / "workloads" / "statefulset", components=components)
    expected = find(documents(rendered(folder)), "StatefulSet", "engine")["spec"]["template"]["spec"]
    installer, sidecar = sorted(expected["initContainers"], key=lambda container: str(container["name"]) == "headroom")
    for init_container in (installer, sidecar):
        init_container["imagePullPolicy"] = "IfNotPresent"
    rendered_containers = {container["name"]: container for container in pod()["initContainers"]}

    assert leaves(rendered_containers["headroom-probe"]) == leaves(installer)
    assert leaves(rendered_containers["headroom"]) == leaves(sidecar)
    ours = [volume for volume in expected["volumes"] if volume["name"].startswith("headroom")]
    assert leaves(pod()["volumes"]) == leaves(ours)
    (vllm,) = pod()["containers"]
    (theirs,) = (container for container in expected["containers"] if container["name"] == "vllm")
    assert [variable for variable in theirs["env"] if variable["name"] in {"PYTHONPATH", "HEADROOM_PROBE_DIR"}] == vllm[
        "env"
    ]
    assert [mount for mount in theirs["volumeMounts"] if mount["name"].startswith("headroom")] == vllm["volumeMounts"]


def test_it_is_valid() -> None:
    deployment = find(documents(WRITTEN.read_text()), "Deployment")

    assert [fault for version in schemas.versions() for fault in schemas.faults(deployment, version)] == []
