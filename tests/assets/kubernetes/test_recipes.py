"""Each recipe builds, its pods are valid and have the components' sidecar, and its monitor selects them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.assets.kubernetes import schemas
from tests.assets.kubernetes.difference import differences
from tests.assets.kubernetes.pods import pods
from tests.assets.kubernetes.rendering import (
    COMPONENTS,
    DEPLOY,
    REPOSITORY,
    Document,
    build,
    documents,
    find,
    kustomization,
    needs_kustomize,
    rendered,
)

pytestmark = needs_kustomize

FOLDER: Final = DEPLOY / "recipes"
RECIPES: Final = sorted(path.parent for path in FOLDER.glob("*/kustomization.yaml"))
CUSTOM: Final = {"LeaderWorkerSet", "InferenceService", "RayService", "StormService"}
MONITORS: Final = {"PodMonitor", "PodMonitoring"}
RESTRICTED_VOLUMES: Final = {"configMap", "downwardAPI", "emptyDir", "persistentVolumeClaim", "projected", "secret"}


def labelled(manifests: list[Document]) -> list[tuple[Document, dict[str, str], dict[str, Any]]]:
    """Return every pod with the label of the sidecar, and the document that describes it."""
    return [
        (document, labels, pod)
        for document in manifests
        for labels, pod in pods(document.get("spec"))
        if labels.get("vllm-headroom") == "enabled"
    ]


def headroom(pod: dict[str, Any]) -> dict[str, Any]:
    """Return the sidecar's container of a pod."""
    (sidecar,) = (
        container
        for container in [*pod.get("initContainers", []), *pod["containers"]]
        if container["name"] == "headroom"
    )
    return dict(sidecar)


def built(name: str) -> list[Document]:
    return documents(rendered(FOLDER / name))


def test_it_is_valid_in_every_version_that_it_is_for(subtests: pytest.Subtests) -> None:
    for recipe in RECIPES:
        with subtests.test(recipe.name):
            manifests = documents(rendered(recipe))
            native = [manifest for manifest in manifests if manifest["kind"] not in CUSTOM | {"PodMonitoring"}]
            inner = [
                {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "inner"}, "spec": pod}
                for manifest in manifests
                if manifest["kind"] in CUSTOM
                for _, pod in pods(manifest["spec"])
            ]
            versions = [version for version in schemas.versions() if version != "1.29" or recipe.name != "gke"]

            assert [
                fault
                for manifest in [*native, *inner]
                for version in versions
                for fault in schemas.faults(manifest, version)
            ] == []


def test_every_pod_with_the_label_has_the_sidecar_of_the_components(subtests: pytest.Subtests) -> None:
    for recipe in RECIPES:
        with subtests.test(recipe.name):
            usual = headroom(find(documents(rendered(DEPLOY / "example")), "Deployment")["spec"]["template"]["spec"])
            manifests = documents(rendered(recipe))
            allowed = {"restartPolicy", "env", "volumeMounts", "resources", "securityContext"}

            assert labelled(manifests)
            for _, _, pod in labelled(manifests):
                container = headroom(pod)
                assert {way[0] for way in differences(usual, container)} <= allowed
                assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
                assert {mount["name"] for mount in container["volumeMounts"]} <= {
                    volume["name"] for volume in pod["volumes"]
                }
            assert "vllm-headroom-template" not in rendered(recipe)


def test_its_monitor_is_where_it_selects_its_pods(subtests: pytest.Subtests) -> None:
    for recipe in RECIPES:
        with subtests.test(recipe.name):
            manifests = documents(rendered(recipe))
            (monitor,) = (manifest for manifest in manifests if manifest["kind"] in MONITORS)
            (endpoint,) = monitor["spec"].get("podMetricsEndpoints") or monitor["spec"]["endpoints"]

            for document, labels, pod in labelled(manifests):
                assert document["metadata"]["namespace"] == monitor["metadata"]["namespace"]
                assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
                assert endpoint["port"] in {port["name"] for port in headroom(pod)["ports"]}
            assert monitor["metadata"]["name"] == "vllm-headroom", "the alerts know the job by it"


def test_the_page_has_every_recipe() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| \[[\w-]+\]\(([\w-]+)\)", text, re.MULTILINE))
    parts = set(re.findall(r"`((?:gpu|memory)-[a-z-]+|evict)`", text))

    assert listed == {path.name for path in RECIPES}
    assert parts <= {path.parent.name for path in COMPONENTS.glob("*/kustomization.yaml")}


def test_openshifts_sidecar_asks_for_nothing_that_restricted_v2_refuses() -> None:
    ((_, _, pod),) = labelled(built("openshift"))
    context = headroom(pod)["securityContext"]
    mounted = {mount["name"] for mount in headroom(pod)["volumeMounts"]}
    kinds = {key for volume in pod["volumes"] if volume["name"] in mounted for key in volume if key != "name"}

    assert not {"runAsUser", "runAsGroup", "privileged"} & context.keys()
    assert (context["runAsNonRoot"], context["allowPrivilegeEscalation"]) == (True, False)
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert kinds <= RESTRICTED_VOLUMES
    assert not {"hostPID", "hostIPC", "hostNetwork"} & pod.keys()


def test_where_the_runtime_is_the_default_there_is_no_runtime_class(subtests: pytest.Subtests) -> None:
    for name in ["eks", "aks"]:
        with subtests.test(name=name):
            ((_, _, pod),) = labelled(built(name))

            assert "runtimeClassName" not in pod
            assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"} in headroom(pod)["env"]


def test_the_router_of_the_production_stack_stays_as_it_is() -> None:
    manifests = documents((FOLDER / "production-stack" / "rendered.yaml").read_text())
    name = "vllm-deployment-router"
    changes = differences(find(manifests, "Deployment", name), find(built("production-stack"), "Deployment", name))

    assert changes == {("metadata", "namespace"): (None, "vllm")}


def test_a_worker_of_a_group_reads_the_engine_at_its_leader() -> None:
    leader, worker = (headroom(pod) for _, _, pod in labelled(built("leaderworkerset")))
    difference = [variable for variable in worker["env"] if variable not in leader["env"]]

    assert difference == [
        {"name": "HEADROOM_ENGINE_URL", "value": "http://$(LWS_LEADER_ADDRESS):8000/metrics"},
        {"name": "HEADROOM_GPUS", "value": "all"},
    ]


def test_a_custom_resource_without_the_entries_fails_the_build(tmp_path: Path) -> None:
    text = (FOLDER / "kserve" / "vllm.yaml").read_text().replace("    initContainers: [{name: headroom}]\n", "")
    (tmp_path / "vllm.yaml").write_text(text)
    components = [COMPONENTS / component for component in ("template", "sidecar", "custom-resource")]
    done = build(kustomization(tmp_path, resource=tmp_path / "vllm.yaml", components=components))

    assert done.returncode != 0
    assert "initContainers" in done.stderr


def test_the_daemonset_sees_the_nodes_processes_and_names_and_nothing_more() -> None:
    ((_, _, pod),) = labelled(built("daemonset"))
    container = headroom(pod)
    folders = {volume["hostPath"]["path"] for volume in pod["volumes"]}
    (monitor,) = (manifest for manifest in built("daemonset") if manifest["kind"] == "PodMonitor")

    assert pod["hostPID"] is True
    assert not {"hostNetwork", "hostIPC", "serviceAccountName"} & pod.keys()
    assert pod["automountServiceAccountToken"] is False
    # The kubelet makes /var/log/pods for root alone.
    assert folders == {"/var/log/containers", "/var/lib/vllm-headroom"}
    read_only = [mount["mountPath"] for mount in container["volumeMounts"] if mount.get("readOnly")]
    assert read_only == ["/var/log/containers"]
    assert {"name": "HEADROOM_ENGINES", "value": "node"} in container["env"]
    assert monitor["spec"]["podMetricsEndpoints"][0]["honorLabels"] is True


@pytest.mark.parametrize(
    ("unit", "engine_url", "pod"),
    [
        ("vllm-llama.service", "", "vllm-llama.service"),
        ("", "http://192.0.2.7:8001/metrics", "http://192.0.2.7:8001/metrics"),
        ("", "", "llama-0"),
    ],
)
def test_an_engine_outside_pods_has_its_unit_or_url_as_pod_and_a_pod_keeps_its_name(
    unit: str, engine_url: str, pod: str
) -> None:
    (monitor,) = (each for each in built("daemonset") if each["kind"] == "PodMonitor")
    (rule,) = monitor["spec"]["podMetricsEndpoints"][0]["metricRelabelings"]
    guide = (FOLDER.parents[2] / "docs" / "node.md").read_text()
    (documented,) = yaml.safe_load(guide.partition("metric_relabel_configs:\n")[2].partition("```")[0])

    assert [documented[name] for name in ("source_labels", "regex", "target_label", "replacement")] == [
        rule[name] for name in ("sourceLabels", "regex", "targetLabel", "replacement")
    ]
    assert rule["targetLabel"] == "pod"
    # As in Prometheus: the whole text must match, and otherwise nothing is replaced.
    match = re.fullmatch(
        rule["regex"], ";".join({"unit": unit, "engine_url": engine_url}[k] for k in rule["sourceLabels"])
    )
    replaced = "llama-0" if match is None else (match[1] or "") + (match[2] or "")
    assert replaced == pod


SPEC: Final = re.compile(r"([a-z_]+)(?:\{([a-z_]+)=([a-z]+)\})?")
EPP: Final[dict[str, Any]] = yaml.safe_load((FOLDER / "llm-d" / "epp-config.yaml").read_text())


def test_the_routers_plugins_are_all_there_and_all_used() -> None:
    named = {plugin.get("name", plugin["type"]) for plugin in EPP["plugins"]}
    used = {plugin["pluginRef"] for profile in EPP["schedulingProfiles"] for plugin in profile["plugins"]}
    for source in EPP["dataLayer"]["sources"]:
        used |= {source["pluginRef"], *(extractor["pluginRef"] for extractor in source["extractors"])}

    assert used | {"single-profile-handler"} == named


def test_the_router_reads_series_that_a_page_has_and_acts_on_the_gate() -> None:
    plugins = {plugin.get("name", plugin["type"]): plugin.get("parameters", {}) for plugin in EPP["plugins"]}
    (engine,) = plugins["headroom-extractor"]["engineConfigs"]
    (gate,) = engine["customMetrics"]
    specs = [value for key, value in engine.items() if key.endswith("Spec")] + [gate["metricSpec"]]
    matches = [SPEC.fullmatch(spec) for spec in specs]
    assert all(matches)
    series = {match[1]: match[2] for match in matches if match}
    contract = [line.split() for line in (REPOSITORY / "tests" / "assets" / "contract.txt").read_text().splitlines()]
    labels = {name: labels.split(",") for name, _, labels in (row for row in contract if len(row) == 3)}

    assert gate["metricSpec"] == "headroom_gate_open{gate=ready}"
    assert plugins["gate"]["attribute"] == plugins["gate-open"]["attributeKey"] == gate["attributeKey"]
    assert (plugins["gate"]["onMissing"], plugins["gate"]["fallbackOnEmpty"]) == ("Pass", True)
    assert all(label is None or label in labels[name] for name, label in series.items())
    assert plugins["headroom"]["port"] == 9839
