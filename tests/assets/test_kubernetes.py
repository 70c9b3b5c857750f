"""Every case renders as written down, is valid in the versions it is for, and the example's parts fit each other."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from alerts.generate import RUNBOOKS_URL, with_links
from tests.assets.kubernetes import schemas
from tests.assets.kubernetes.rendering import (
    CASES,
    COMPONENTS,
    DEPLOY,
    REPOSITORY,
    Document,
    documents,
    find,
    kustomization,
    needs_kustomize,
    rendered,
)
from tests.assets.promql import read_yaml
from tests.conftest import Golden
from vllm_headroom.config import Settings

EXAMPLE: Final = DEPLOY / "example"


def example(kind: str, name: str | None = None) -> Document:
    return find(documents(rendered(EXAMPLE)), kind, name)


def vllm() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the specification of the example's pods, and its container of vLLM."""
    pod: dict[str, Any] = example("Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return pod, container


@needs_kustomize
def test_a_case_renders_as_written_down(golden: Golden, subtests: pytest.Subtests) -> None:
    for case in CASES:
        with subtests.test(case.name):
            texts = [text for text in rendered(case).split("---\n") if not is_shown_elsewhere(read_yaml(text))]

            golden(case / "rendered.yaml", "---\n".join(texts))


def is_shown_elsewhere(document: Document) -> bool:
    """Return True for the alerts and the dashboards, which are tested where they are made."""
    return document["kind"] == "PrometheusRule" or "dashboard" in document["metadata"]["name"]


@needs_kustomize
def test_a_case_is_valid_in_every_version_that_it_is_for(subtests: pytest.Subtests) -> None:
    for case in CASES:
        with subtests.test(case.name):
            manifests = documents(rendered(case))
            versions = [(version, tuple(map(int, version.split(".")))) for version in schemas.versions()]

            assert [
                fault
                for name, version in versions
                for document in manifests
                if version >= schemas.DRA_SINCE or not schemas.uses_dra(document)
                for fault in schemas.faults(document, name)
            ] == []


@needs_kustomize
def test_a_field_that_is_not_there_is_a_fault(subtests: pytest.Subtests) -> None:
    for case, kind, way, value in [
        (
            "example",
            "Deployment",
            ("spec", "template", "spec", "initContainers", 0, "securityContext", "runAsRoot"),
            True,
        ),
        ("example", "Deployment", ("spec", "template", "spec", "initContainers", 0, "restartPolicies"), "Always"),
        (
            "example",
            "Deployment",
            ("spec", "template", "spec", "initContainers", 0, "env", 0, "valueFrom", "resourceFieldRef", "container"),
            "vllm",
        ),
        ("example", "PodMonitor", ("spec", "podMetricsEndpoints", 0, "ports"), "headroom"),
        ("example", "PodMonitor", ("spec", "podMetricsEndpoints", 0, "interval"), "15 seconds"),
        ("example", "PrometheusRule", ("spec", "groups", 0, "rules", 0, "expression"), "up"),
        ("example-keda", "ScaledObject", ("spec", "triggers", 0, "metadata", "threshold"), 4),
        ("example-keda", "ScaledObject", ("spec", "maxReplicas"), 4),
        ("example-dra", "ResourceClaimTemplate", ("spec", "spec", "devices", "requests", 0, "count"), 2),
    ]:
        with subtests.test(case, way=way):
            (path,) = (case_path for case_path in CASES if case_path.name == case)
            broken = copy.deepcopy(find(documents(rendered(path)), kind))
            part: Any = broken
            for step in way[:-1]:
                part = part[step]
            part[way[-1]] = value

            assert schemas.faults(broken, schemas.versions()[-1])


@needs_kustomize
def test_dra_is_of_1_34() -> None:
    (path,) = (case for case in CASES if case.name == "example-dra")
    template = find(documents(rendered(path)), "ResourceClaimTemplate")

    assert schemas.faults(template, "1.33")
    assert not schemas.faults(template, "1.34")


@needs_kustomize
def test_the_sidecar_is_given_the_memory_limit_of_a_container_that_there_is(subtests: pytest.Subtests) -> None:
    for case, containers in [("example", "initContainers"), ("example-plain", "containers")]:
        with subtests.test(case=case, containers=containers):
            (path,) = (case_path for case_path in CASES if case_path.name == case)
            pod = find(documents(rendered(path)), "Deployment")["spec"]["template"]["spec"]
            (sidecar,) = (container for container in pod[containers] if container["name"] == "headroom")

            (limit,) = (
                variable["valueFrom"]
                for variable in sidecar["env"]
                if variable["name"] == "HEADROOM_HOST_MEMORY_LIMIT_BYTES"
            )
            (vllm,) = (
                container
                for container in pod["containers"]
                if container["name"] == limit["resourceFieldRef"]["containerName"]
            )

            assert limit["resourceFieldRef"]["resource"] == "limits.memory"
            assert vllm["resources"]["limits"]["memory"] == "32Gi"


@needs_kustomize
def test_images_are_pinned_and_settings_exist(subtests: pytest.Subtests) -> None:
    for case in CASES:
        with subtests.test(case.name):
            text = rendered(case)
            settings = {f"HEADROOM_{name.upper()}" for name in Settings.model_fields}

            images = re.findall(r"(?m)^ +(?:- )?image: (\S+)$", text)
            assert images or case.name == "base-of-others"
            assert all(re.search(r"(:v?\d[\w.]*|@sha256:\w{64})$", image) for image in images)
            assert set(re.findall(r"name: (HEADROOM_\w+)", text)) <= settings


@needs_kustomize
def test_the_monitor_finds_the_sidecars_port_and_is_called_as_the_alerts_have_it() -> None:
    monitor = example("PodMonitor")
    template = example("Deployment")["spec"]["template"]
    (headroom,) = template["spec"]["initContainers"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]

    assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert endpoint["port"] in {port["name"] for port in headroom["ports"]}
    assert f'job=~"(.+/)?{monitor["metadata"]["name"]}"' in yaml.safe_dump(example("PrometheusRule"), width=10**6)


@needs_kustomize
def test_the_examples_vllm_has_time_to_load_and_to_end() -> None:
    pod, container = vllm()
    startup, readiness, liveness = (
        container[f"{probe_name}Probe"] for probe_name in ("startup", "readiness", "liveness")
    )
    waits = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    (drains,) = (
        int(argument.partition("=")[2]) for argument in container["args"] if argument.startswith("--shutdown-timeout=")
    )

    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800
    assert readiness["periodSeconds"] * readiness["failureThreshold"] <= 30
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 120
    assert pod["terminationGracePeriodSeconds"] > waits + drains
    assert (
        example("Deployment")["spec"]["progressDeadlineSeconds"]
        > startup["periodSeconds"] * startup["failureThreshold"]
    )


@needs_kustomize
def test_the_examples_vllm_has_its_volumes_and_no_token() -> None:
    pod, container = vllm()
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}

    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"  # noqa: S108 - where NCCL looks
    assert (
        mounts["/models"]["persistentVolumeClaim"]["claimName"] == example("PersistentVolumeClaim")["metadata"]["name"]
    )
    assert pod["automountServiceAccountToken"] is False
    assert (
        example("Service")["spec"]["selector"].items()
        <= example("Deployment")["spec"]["template"]["metadata"]["labels"].items()
    )


@needs_kustomize
def test_the_policy_closes_the_sidecars_port_and_no_other() -> None:
    (case,) = (case for case in CASES if case.name == "example-keda")
    policy = find(documents(rendered(case)), "NetworkPolicy")["spec"]
    prometheus, everyone = policy["ingress"]
    ranges = [
        (port_rule["port"], port_rule.get("endPort", port_rule["port"]))
        for port_rule in everyone["ports"]
        if "port" in port_rule
    ]
    port = Settings.model_fields["listen_port"].default
    closed = [free_port for free_port in range(1, 65536) if not any(low <= free_port <= high for low, high in ranges)]

    assert closed == [port]
    assert (8000, 8000) in ranges
    assert [port_rule["protocol"] for port_rule in everyone["ports"] if "port" not in port_rule] == ["UDP", "SCTP"]
    assert "from" not in everyone
    assert (prometheus["ports"], len(prometheus["from"])) == ([{"protocol": "TCP", "port": port}], 1)
    assert policy["policyTypes"] == ["Ingress"]


@needs_kustomize
@pytest.mark.parametrize("linked", [("runbook",), ("dashboard",), ("runbook", "dashboard")])
def test_one_address_gives_every_alert_its_link(tmp_path: Path, linked: tuple[str, ...]) -> None:
    addresses = {"runbook": "https://git.your.org/main/runbooks", "dashboard": "http://grafana.your.org:3000/g"}
    folder = kustomization(
        tmp_path,
        components=[COMPONENTS / component for component in ("prometheusrule", *(f"{name}-links" for name in linked))],
    )
    keys = {"runbooks": addresses["runbook"], "grafana": addresses["dashboard"]}
    local = {"annotations": {"config.kubernetes.io/local-config": "true"}}
    generator = {"name": "vllm-headroom-addresses", "literals": [f"{key}={url}" for key, url in keys.items()]}
    with (folder / "kustomization.yaml").open("a") as file:
        yaml.safe_dump({"configMapGenerator": [{**generator, "options": local}]}, file)

    (rule_object,) = documents(rendered(folder))
    wanted = with_links(
        (REPOSITORY / "alerts" / "rules" / "headroom.yaml").read_text(),
        runbooks=f"{addresses['runbook']}/{{alert}}.md" if "runbook" in linked else RUNBOOKS_URL,
        dashboards=addresses["dashboard"] if "dashboard" in linked else None,
    )
    assert by_name(rule_object["spec"]["groups"]) == by_name(read_yaml(wanted)["groups"])


def by_name(groups: list[dict[str, Any]]) -> dict[str, Any]:
    return {group["name"]: group for group in groups}


@needs_kustomize
def test_the_local_example_runs_an_image_that_one_has_built_and_needs_no_operator() -> None:
    manifests = documents(rendered(DEPLOY / "example-local"))
    (sidecar,) = find(manifests, "Deployment")["spec"]["template"]["spec"]["initContainers"]
    lines = (DEPLOY / "example-local" / "kustomization.yaml").read_text()

    assert {document["apiVersion"].partition("/")[0] for document in manifests} == {"v1", "apps"}
    assert f"docker build --tag {sidecar['image']} ." in lines
    assert sidecar.get("imagePullPolicy", "IfNotPresent") == "IfNotPresent"
