"""The guardrail's component on workloads of all shapes, with either sidecar: what the sidecar gets, and nobody else."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from tests.assets.kubernetes import schemas
from tests.assets.kubernetes.combinations import WORKLOADS, build_pairs
from tests.assets.kubernetes.difference import differences
from tests.assets.kubernetes.rendering import (
    COMPONENTS,
    Document,
    build,
    documents,
    kustomization,
    needs_kustomize,
)
from tests.fakes.api_server.cluster import ROLE
from vllm_headroom.daemon.pod_api import ACCOUNT

pytestmark = needs_kustomize

POD: Final = ("spec", "template", "spec")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Document, Document]]:
    """Every workload with either sidecar, without the guardrail and with it."""
    return build_pairs("evict", tmp_path_factory)


def pod(workload: Document) -> dict[str, Any]:
    return dict(workload["spec"]["template"]["spec"])


def test_the_sidecar_alone_gets_the_token(pairs: list[tuple[Document, Document]], subtests: pytest.Subtests) -> None:
    for pair in pairs:
        with subtests.test(workload=pair[0]["metadata"]["name"]):
            spec = pod(pair[1])
            every = [*spec.get("initContainers", []), *spec["containers"]]
            (sidecar,) = [container for container in every if container["name"] == "headroom"]
            with_token = [
                container["name"]
                for container in every
                for mount in container.get("volumeMounts", ())
                if mount["name"] == "headroom-api"
            ]
            (volume,) = [pod_volume for pod_volume in spec["volumes"] if pod_volume["name"] == "headroom-api"]
            files = [next(iter(source.values())) for source in volume["projected"]["sources"]]
            paths = {file.get("path") or file["items"][0]["path"] for file in files}
            (mount,) = [
                sidecar_mount for sidecar_mount in sidecar["volumeMounts"] if sidecar_mount["mountPath"] == str(ACCOUNT)
            ]

            names = [variable for variable in sidecar["env"] if variable["name"] in {"HEADROOM_EVICT", "POD_NAME"}]

            assert with_token == ["headroom"]
            assert spec["automountServiceAccountToken"] is False
            assert mount == {"name": "headroom-api", "mountPath": str(ACCOUNT), "readOnly": True}
            assert paths == {"token", "ca.crt", "namespace"}
            assert sorted(names, key=lambda variable: variable["name"]) == [
                {"name": "HEADROOM_EVICT", "value": "dry-run"},
                {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            ]


def test_nothing_else_changes_above_all_no_probe_and_no_grace(
    pairs: list[tuple[Document, Document]], subtests: pytest.Subtests
) -> None:
    for pair in pairs:
        with subtests.test(workload=pair[0]["metadata"]["name"]):
            changed = {".".join(map(str, way)) for way in differences(*pair)}
            ours = ("serviceAccountName", "automountServiceAccountToken", "volumes.headroom-api")

            assert {
                way
                for way in changed
                if not way.startswith(tuple(".".join((*POD, entry)) for entry in ours)) and ".headroom." not in way
            } == set()


def test_it_is_valid(pairs: list[tuple[Document, Document]], subtests: pytest.Subtests) -> None:
    for pair in pairs:
        with subtests.test(workload=pair[0]["metadata"]["name"]):
            assert [fault for version in schemas.versions() for fault in schemas.faults(pair[1], version)] == []


def test_the_role_has_exactly_the_verbs_that_are_used() -> None:
    account, role, binding = documents((COMPONENTS / "evict" / "rbac.yaml").read_text())
    granted = {
        f"{verb} {resource}" for rule in role["rules"] for verb in rule["verbs"] for resource in rule["resources"]
    }

    assert granted == ROLE
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [subject["name"] for subject in binding["subjects"]] == [account["metadata"]["name"]]


@pytest.mark.parametrize(
    ("components", "problem"),
    [
        (["evict", "sidecar"], "/spec/template/spec/shareProcessNamespace"),
        (["sidecar", "account"], "serviceAccountName"),
    ],
)
def test_a_pod_without_the_sidecar_or_with_an_account_is_refused(
    components: list[str], problem: str, tmp_path: Path
) -> None:
    if "account" in components:
        (tmp_path / "account").mkdir()
        (tmp_path / "account" / "kustomization.yaml").write_text(
            "apiVersion: kustomize.config.k8s.io/v1alpha1\nkind: Component\npatches:\n- target: {kind: Deployment}\n"
            "  patch: '[{op: add, path: /spec/template/spec/serviceAccountName, value: mine}]'\n"
        )
    folders = [tmp_path / component if component == "account" else COMPONENTS / component for component in components]
    folders += [COMPONENTS / "evict"] if "account" in components else []
    built = build(kustomization(tmp_path, resource=WORKLOADS["a Deployment"].folder, components=folders))

    assert built.returncode != 0
    assert problem in built.stderr
