"""Helm itself installs releases side by side, upgrades one and removes it; the others stay as they were."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest

from tests.assets.kubernetes import helm, schemas
from tests.assets.kubernetes.rendering import Document, documents

EVERYTHING: Final[dict[str, Any]] = {"sidecar": {"evict": "on", "probe": True}, "networkPolicy": {"enabled": True}}
RELEASES: Final = ("a", "a-headroom", "123", "x" * 53)
"""A name that is the beginning of another, one that YAML reads as a number, and the longest that Helm takes."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return helm.parent(tmp_path_factory.mktemp("engine"), probe=True)


def ours(manifests: list[Document]) -> list[Document]:
    """Return the objects without the Deployment, whose name is its own chart's."""
    return [manifest for manifest in manifests if manifest["kind"] != "Deployment"]


def key(document: Document) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]


def owner(document: Document) -> str:
    assert document["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "Helm"
    return str(document["metadata"]["annotations"]["meta.helm.sh/release-name"])


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    absent = [
        expression["key"]
        for expression in selector.get("matchExpressions", [])
        if expression["operator"] == "DoesNotExist"
    ]
    return selector["matchLabels"].items() <= labels.items() and not any(name in labels for name in absent)


def installed(engine: Path) -> list[dict[str, Any]]:
    return [helm.step("install", release, engine, **{"vllm-headroom": EVERYTHING}) for release in RELEASES]


def test_no_object_of_a_release_is_called_as_one_of_another_and_each_is_its_own(engine: Path) -> None:
    done = helm.run(*installed(engine))
    counted = Counter(owner(entry) for entry in ours(done["objects"]))

    assert [answer.get("error") for answer in done["answers"]] == [None] * len(RELEASES)
    assert len({key(rule) for rule in ours(done["objects"])}) == sum(counted.values())
    assert counted == dict.fromkeys(RELEASES, 5)
    assert [
        fault
        for document in done["objects"]
        for version in schemas.versions()
        for fault in schemas.faults(document, version)
    ] == []


def test_a_monitor_selects_the_pods_of_its_release_alone(engine: Path) -> None:
    done = helm.run(*installed(engine), helm.step("install", "alone"))
    pods = {}
    for release, answer in zip(RELEASES, done["answers"], strict=False):
        (deployment,) = (document for document in documents(answer["manifest"]) if document["kind"] == "Deployment")
        pods[release] = deployment["spec"]["template"]["metadata"]["labels"]
    pods["alone"] = {"vllm-headroom": "enabled"}
    selectors = {
        owner(document): document["spec"]["selector"]
        for document in done["objects"]
        if document["kind"] == "PodMonitor"
    }
    policies = {
        owner(manifest): manifest["spec"]["podSelector"]
        for manifest in done["objects"]
        if manifest["kind"] == "NetworkPolicy"
    }

    assert policies.items() <= selectors.items()
    assert {
        release: [pod_owner for pod_owner, labels in pods.items() if selects(selector, labels)]
        for release, selector in selectors.items()
    } == {release_name: [release_name] for release_name in (*RELEASES, "alone")}


def test_an_upgrade_and_the_end_of_a_release_leave_the_others(engine: Path) -> None:
    fewer_values = {
        "vllm-headroom": {**EVERYTHING, "networkPolicy": {"enabled": False}, "podMonitor": {"interval": "30s"}}
    }
    first_run = helm.run(*installed(engine))
    upgraded = helm.run(*installed(engine), helm.step("upgrade", "a", engine, **fewer_values))
    uninstalled = helm.run(*installed(engine), helm.step("uninstall", "a"))

    def of_others(done: dict[str, Any]) -> list[Document]:
        return [rule for rule in ours(done["objects"]) if owner(rule) != "a"]

    assert not any("error" in answer for answer in (*upgraded["answers"], *uninstalled["answers"]))
    assert of_others(upgraded) == of_others(uninstalled) == of_others(first_run)
    mine = {key(entry)[0]: entry for entry in ours(upgraded["objects"]) if owner(entry) == "a"}
    assert "NetworkPolicy" not in mine
    assert mine["PodMonitor"]["spec"]["podMetricsEndpoints"][0]["interval"] == "30s"
    assert [owner(document) for document in uninstalled["objects"] if owner(document) == "a"] == []


def test_a_second_cluster_chart_in_a_namespace_is_refused_and_one_beside_engines_is_not() -> None:
    steps = [helm.step("install", "boards", helm.CLUSTER), helm.step("install", "a"), helm.step("install", "b")]
    *fine, refused = helm.run(*steps, helm.step("install", "again", helm.CLUSTER))["answers"]

    assert [answer.get("error") for answer in fine] == [None] * 3
    assert "invalid ownership metadata" in refused["error"]
    assert 'current value is "boards"' in refused["error"]
