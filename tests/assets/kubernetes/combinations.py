"""Workloads of all shapes, and each of them with a sidecar and a way to its GPU."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from tests.assets.kubernetes.rendering import (
    COMPONENTS,
    DEPLOY,
    HERE,
    Document,
    documents,
    find,
    kustomization,
    rendered,
)

SIDECARS: Final = {"sidecar": "initContainers", "sidecar-plain": "containers"}
"""The components, and the list of the pod's in which each puts its container."""

GPUS: Final = ("gpu-runtime-class", "gpu-dra", "gpu-nri", "gpu-amd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A folder with a workload in it; `label` is a component that gives it the label, where it has none."""

    folder: Path
    kind: str
    name: str
    label: Path | None = None


WORKLOADS: Final = {
    "a Deployment": Workload(folder=DEPLOY / "example" / "vllm", kind="Deployment", name="vllm"),
    "a StatefulSet of two containers": Workload(
        folder=HERE / "workloads" / "statefulset", kind="StatefulSet", name="engine"
    ),
    "a Deployment with init containers": Workload(
        folder=HERE / "workloads" / "init-containers",
        kind="Deployment",
        name="engine",
        label=HERE / "base-of-others" / "label",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """A workload before and after, and what else there is."""

    workload: Workload
    sidecar: str
    gpu: str
    workload_before: Document
    workload_after: Document
    others_before: list[Document]
    others_after: list[Document]

    @property
    def pod(self) -> dict[str, Any]:
        """Return the specification of its pods."""
        spec: dict[str, Any] = self.workload_after["spec"]["template"]["spec"]
        return spec

    @property
    def headroom(self) -> dict[str, Any]:
        """Return the sidecar's container."""
        (container,) = (
            pod_container for pod_container in self.pod[SIDECARS[self.sidecar]] if pod_container["name"] == "headroom"
        )
        return dict(container)


def combined(workload: Workload, sidecar: str, gpu: str, folder: Path) -> Combination:
    """Return the combination, built in an empty folder."""
    components = [COMPONENTS / sidecar, COMPONENTS / gpu]
    if workload.label:
        components.insert(0, workload.label)
    manifests = documents(rendered(workload.folder))
    manifests_after = documents(rendered(kustomization(folder, resource=workload.folder, components=components)))
    mine, theirs = (find(manifest_list, workload.kind, workload.name) for manifest_list in (manifests, manifests_after))
    return Combination(
        workload=workload,
        sidecar=sidecar,
        gpu=gpu,
        workload_before=mine,
        workload_after=theirs,
        others_before=[manifest for manifest in manifests if manifest is not mine],
        others_after=[manifest for manifest in manifests_after if manifest is not theirs],
    )


def build_pairs(component: str, folders: pytest.TempPathFactory) -> list[tuple[Document, Document]]:
    """Return every workload with either sidecar, without this component and with it."""
    pairs = []
    for workload, sidecar in itertools.product(WORKLOADS.values(), SIDECARS):
        components = [COMPONENTS / sidecar, COMPONENTS / "gpu-runtime-class"]
        if workload.label:
            components.insert(0, workload.label)
        without_it, with_it = (
            kustomization(folders.mktemp("pair"), resource=workload.folder, components=chosen)
            for chosen in (components, [*components, COMPONENTS / component])
        )
        workload_before = find(documents(rendered(without_it)), workload.kind, workload.name)
        workload_after = find(documents(rendered(with_it)), workload.kind, workload.name)
        pairs.append((workload_before, workload_after))
    return pairs
