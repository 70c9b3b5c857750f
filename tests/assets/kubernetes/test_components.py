"""Every sidecar with every way to its GPU, on workloads of all shapes: what is added, and that nothing else changes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.assets.kubernetes.combinations import GPUS, SIDECARS, WORKLOADS, Combination, combined
from tests.assets.kubernetes.difference import differences
from tests.assets.kubernetes.rendering import COMPONENTS, REPOSITORY, build, kustomization, needs_kustomize
from vllm_headroom.config import Settings

pytestmark = needs_kustomize

TEMPLATE: Final = ("spec", "template")
POD: Final = (*TEMPLATE, "spec")
Changes = dict[tuple[str, ...], tuple[Any, Any]]


@pytest.fixture(scope="module")
def combinations(tmp_path_factory: pytest.TempPathFactory) -> list[Combination]:
    return [
        combined(WORKLOADS[workload], sidecar, gpu, tmp_path_factory.mktemp("combination"))
        for workload, sidecar, gpu in itertools.product(WORKLOADS, SIDECARS, GPUS)
    ]


def test_nothing_of_the_workload_changes_but_what_the_components_say(
    combinations: list[Combination], subtests: pytest.Subtests
) -> None:
    for combination in combinations:
        with subtests.test(workload=combination.workload.name, sidecar=combination.sidecar, gpu=combination.gpu):
            changes = differences(combination.workload_before, combination.workload_after)
            ours = {way for way in changes if way[:3] == POD and way[4:] and way[4].startswith("headroom")}

            assert {way: changes[way] for way in changes.keys() - ours} == pod_changes(combination) | gpu_changes(
                combination
            )


def pod_changes(combination: Combination) -> Changes:
    changes: Changes = {
        ("metadata", "annotations", "vllm-headroom/sidecar"): (
            None,
            {"initContainers": "native", "containers": "plain"}[SIDECARS[combination.sidecar]],
        ),
        ("metadata", "annotations", "vllm-headroom/gpu"): (None, combination.gpu.removeprefix("gpu-")),
        (*TEMPLATE, "metadata", "labels", "vllm-headroom"): (None, "enabled"),
        (*POD, "shareProcessNamespace"): (None, True),
    }
    if combination.workload.label:
        changes["metadata", "labels", "vllm-headroom"] = (None, "enabled")
    return changes


def gpu_changes(combination: Combination) -> Changes:
    pod_before = combination.workload_before["spec"]["template"]["spec"]
    if combination.gpu == "gpu-amd":
        return {}
    if combination.gpu == "gpu-nri":
        annotation = "nvidia.cdi.k8s.io/container.headroom"
        return {(*TEMPLATE, "metadata", "annotations", annotation): (None, "nvidia.com/gpu=all")}
    if combination.gpu == "gpu-runtime-class":
        return {} if "runtimeClassName" in pod_before else {(*POD, "runtimeClassName"): (None, "nvidia")}
    vllm = (*POD, "containers", "vllm", "resources")
    (resources,) = (container["resources"] for container in pod_before["containers"] if container["name"] == "vllm")
    amounts = {section: resources.get(section, {}) for section in ("limits", "requests")}
    gpu_counts = {section: there["nvidia.com/gpu"] for section, there in amounts.items() if "nvidia.com/gpu" in there}
    return {
        (*POD, "resourceClaims", "gpu", "name"): (None, "gpu"),
        (*POD, "resourceClaims", "gpu", "resourceClaimTemplateName"): (None, "vllm-gpus"),
        (*vllm, "claims", "gpu", "name"): (None, "gpu"),
        **{(*vllm, section, "nvidia.com/gpu"): (count, None) for section, count in gpu_counts.items()},
        **{(*vllm, section): (None, {}) for section, there in amounts.items() if not there.keys() - {"nvidia.com/gpu"}},
    }


def test_other_documents_are_left_alone(combinations: list[Combination], subtests: pytest.Subtests) -> None:
    for combination in combinations:
        with subtests.test(workload=combination.workload.name, sidecar=combination.sidecar, gpu=combination.gpu):
            added = [document for document in combination.others_after if document not in combination.others_before]

            assert [
                manifest for manifest in combination.others_after if manifest not in added
            ] == combination.others_before
            assert [manifest["kind"] for manifest in added] == (
                ["ResourceClaimTemplate"] if combination.gpu == "gpu-dra" else []
            )


def test_a_native_sidecar_starts_first_and_a_plain_one_is_not_the_default_container(
    combinations: list[Combination], subtests: pytest.Subtests
) -> None:
    for combination in combinations:
        with subtests.test(workload=combination.workload.name, sidecar=combination.sidecar, gpu=combination.gpu):
            pod_before = combination.workload_before["spec"]["template"]["spec"]
            first_names = [container["name"] for container in pod_before.get("initContainers", [])]
            then = [container["name"] for container in pod_before["containers"]]
            if combination.gpu == "gpu-dra":
                then.sort(key="vllm".__ne__)
            native = combination.sidecar == "sidecar"

            assert [container["name"] for container in combination.pod.get("initContainers", [])] == [
                "headroom"
            ] * native + first_names
            assert [container["name"] for container in combination.pod["containers"]] == then + ["headroom"] * (
                not native
            )
            assert combination.headroom.get("restartPolicy") == ("Always" if native else None)


def test_the_sidecar_sees_gpus_in_the_way_of_its_component_alone(
    combinations: list[Combination], subtests: pytest.Subtests
) -> None:
    for combination in combinations:
        with subtests.test(workload=combination.workload.name, sidecar=combination.sidecar, gpu=combination.gpu):
            container = combination.headroom
            env = {variable["name"]: variable["value"] for variable in container["env"] if "value" in variable}
            expected: dict[str, dict[str, str]] = {
                "gpu-runtime-class": {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "utility"},
                "gpu-dra": {"HEADROOM_GPUS": "all"},
                "gpu-nri": {},
                "gpu-amd": {},
            }

            assert env == {"HEADROOM_STATE_DIR": "/var/lib/vllm-headroom"} | expected[combination.gpu]
            assert container["resources"].get("claims") == ([{"name": "gpu"}] if combination.gpu == "gpu-dra" else None)
            assert not any(
                "nvidia.com" in name for name in (container["resources"]["requests"] | container["resources"]["limits"])
            )


def test_the_sidecar_is_restricted_as_the_pod_security_standard_has_it_or_may_trace(
    combinations: list[Combination], subtests: pytest.Subtests
) -> None:
    for combination in combinations:
        with subtests.test(workload=combination.workload.name, sidecar=combination.sidecar, gpu=combination.gpu):
            restricted = {
                "runAsNonRoot": True,
                "runAsUser": 65532,
                "runAsGroup": 65532,
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
                "seccompProfile": {"type": "RuntimeDefault"},
            }
            tracing = {
                "runAsNonRoot": False,
                "runAsUser": 0,
                "runAsGroup": 0,
                "capabilities": {"drop": ["ALL"], "add": ["SYS_PTRACE"]},
            }

            assert combination.headroom["securityContext"] == (
                restricted | tracing if combination.gpu == "gpu-amd" else restricted
            )
            assert not {"hostPID", "hostNetwork", "hostIPC"} & combination.pod.keys()
            assert not any("hostPath" in volume for volume in combination.pod["volumes"])


def test_the_sidecar_can_neither_hold_back_nor_starve_nor_evict_the_engine(
    combinations: list[Combination], subtests: pytest.Subtests
) -> None:
    for combination in combinations:
        with subtests.test(workload=combination.workload.name, sidecar=combination.sidecar, gpu=combination.gpu):
            container = combination.headroom

            assert not {"readinessProbe", "startupProbe", "lifecycle"} & container.keys()
            assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "headroom"}
            # Else a sidecar that hangs would live as long as the engine's grace period, which may be an hour.
            assert container["livenessProbe"]["terminationGracePeriodSeconds"] == 10
            assert {variable["name"] for variable in container["env"]} >= {"POD_NAME", "POD_NAMESPACE"}
            assert container["ports"] == [
                {"name": "headroom", "containerPort": Settings.model_fields["listen_port"].default}
            ]
            assert container["resources"]["requests"] == {"cpu": "25m", "memory": "96Mi"}
            assert container["resources"]["limits"] == {"memory": "192Mi"}
            volumes = {volume["name"]: volume.get("emptyDir") for volume in combination.pod["volumes"]}
            for mount in container["volumeMounts"]:
                assert volumes[mount["name"]]["medium"] == "Memory"
                assert volumes[mount["name"]]["sizeLimit"]


def test_the_service_accounts_token_is_kept_from_the_sidecar_alone(
    combinations: list[Combination], subtests: pytest.Subtests
) -> None:
    for combination in combinations:
        with subtests.test(workload=combination.workload.name, sidecar=combination.sidecar, gpu=combination.gpu):
            path = "/var/run/secrets/kubernetes.io/serviceaccount"
            every = [*combination.pod.get("initContainers", []), *combination.pod["containers"]]
            covered = [c["name"] for c in every for mount in c.get("volumeMounts", []) if mount["mountPath"] == path]

            assert covered == ["headroom"]


def test_what_does_not_belong_together_is_not_built(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for components in [
        *([gpu] for gpu in GPUS),
        *([gpu, sidecar] for gpu, sidecar in itertools.product(GPUS, SIDECARS)),
        *(["sidecar", *pair] for pair in itertools.permutations(GPUS, 2)),
    ]:
        with subtests.test(components=components):
            workload = WORKLOADS["a Deployment"].folder
            folder = kustomization(
                tmp_path, resource=workload, components=[COMPONENTS / component for component in components]
            )

            built = build(folder)

            assert built.returncode != 0
            assert "testing value /metadata/annotations/vllm-headroom~1gpu failed" in built.stderr


def test_the_two_sidecars_are_one_but_for_how_they_start() -> None:
    native = yaml.safe_load((COMPONENTS / "sidecar" / "patch.yaml").read_text())
    plain = yaml.safe_load((COMPONENTS / "sidecar-plain" / "patch.yaml").read_text())
    (container,) = native["spec"]["template"]["spec"]["initContainers"]

    assert container == plain[-1]["value"] | {"restartPolicy": "Always"}


def test_the_sidecar_runs_as_whom_its_image_is_made_for() -> None:
    lines = (REPOSITORY / "Dockerfile").read_text().splitlines()

    assert {"USER 65532:65532", "EXPOSE 9839"} <= set(lines)
