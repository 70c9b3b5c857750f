"""The component for the engine's log: what the sidecar gets, and nobody else."""

from __future__ import annotations

import pytest

from tests.assets.kubernetes import schemas
from tests.assets.kubernetes.combinations import build_pairs
from tests.assets.kubernetes.rendering import COMPONENTS, documents, needs_kustomize

pytestmark = needs_kustomize


def test_the_role_reads_pods_and_their_logs_and_nothing_else() -> None:
    account, role, binding = documents((COMPONENTS / "engine-log" / "rbac.yaml").read_text())

    assert [(rule["resources"], rule["verbs"]) for rule in role["rules"]] == [
        (["pods"], ["get"]),
        (["pods/log"], ["get"]),
    ]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [subject["name"] for subject in binding["subjects"]] == [account["metadata"]["name"]]


def test_the_sidecar_alone_gets_the_token_and_the_setting(
    tmp_path_factory: pytest.TempPathFactory, subtests: pytest.Subtests
) -> None:
    for _, workload in build_pairs("engine-log", tmp_path_factory):
        with subtests.test(workload=workload["metadata"]["name"]):
            spec = workload["spec"]["template"]["spec"]
            containers = [*spec.get("initContainers", []), *spec["containers"]]
            with_token = [
                container["name"]
                for container in containers
                if any(mount["name"] == "headroom-api" for mount in container.get("volumeMounts", ()))
            ]
            (sidecar,) = [container for container in containers if container["name"] == "headroom"]

            assert with_token == ["headroom"]
            assert {"name": "HEADROOM_ENGINE_LOG", "value": "kubernetes"} in sidecar["env"]
            assert spec["automountServiceAccountToken"] is False
            assert [fault for version in schemas.versions() for fault in schemas.faults(workload, version)] == []
