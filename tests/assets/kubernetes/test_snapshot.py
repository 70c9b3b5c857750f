"""The component for snapshots of torch's allocator: what vLLM gets, and the size of its folder."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.assets.kubernetes import schemas
from tests.assets.kubernetes.combinations import WORKLOADS
from tests.assets.kubernetes.rendering import (
    COMPONENTS,
    REPOSITORY,
    documents,
    find,
    kustomization,
    needs_kustomize,
    rendered,
)
from vllm_headroom.units import MIB
from vllm_headroom_probe.snapshot import MAX_KEPT_SNAPSHOTS, MAX_SNAPSHOT_BYTES

FOLDER = "/var/lib/headroom-snapshots"


@needs_kustomize
def test_vllm_alone_gets_the_folder(tmp_path: Path) -> None:
    workload = WORKLOADS["a StatefulSet of two containers"]
    names = ("sidecar", "gpu-runtime-class", "probe", "snapshot")
    folder = kustomization(tmp_path, resource=workload.folder, components=[COMPONENTS / name for name in names])
    built = find(documents(rendered(folder)), workload.kind, workload.name)
    spec = built["spec"]["template"]["spec"]
    containers = [*spec.get("initContainers", []), *spec["containers"]]
    mounts = {
        container["name"]: mount["mountPath"]
        for container in containers
        for mount in container.get("volumeMounts", ())
        if mount["name"] == "headroom-snapshots"
    }
    (vllm,) = [container for container in containers if container["name"] == "vllm"]

    assert mounts == {"vllm": FOLDER}
    assert {"name": "HEADROOM_PROBE_SNAPSHOT", "value": FOLDER} in vllm["env"]
    assert [fault for version in schemas.versions() for fault in schemas.faults(built, version)] == []


def test_the_folder_holds_what_the_probe_may_write() -> None:
    component = yaml.safe_load((COMPONENTS / "snapshot" / "kustomization.yaml").read_text())
    (patch,) = component["patches"]
    (volume,) = yaml.safe_load(patch["patch"])["spec"]["template"]["spec"]["volumes"]
    limit = volume["emptyDir"]["sizeLimit"]

    assert int(limit.removesuffix("Mi")) * MIB > (MAX_KEPT_SNAPSHOTS + 1) * MAX_SNAPSHOT_BYTES
    assert f"emptyDir: {{sizeLimit: {limit}}}" in (REPOSITORY / "docs" / "probe.md").read_text()
