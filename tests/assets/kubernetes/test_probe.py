"""The probe's component on workloads of all shapes, with either sidecar: what vLLM gets, and that it can be no harm."""

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
    kustomization,
    needs_kustomize,
)

pytestmark = needs_kustomize

POD: Final = ("spec", "template", "spec")
CODE, FILES = "headroom-probe", "headroom-probe-files"
PATH, FOLDER = "/opt/headroom-probe", "/run/headroom-probe"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Document, Document]]:
    """Every workload with either sidecar, without the probe and with it."""
    return build_pairs("probe", tmp_path_factory)


def containers(workload: Document) -> dict[str, dict[str, Any]]:
    pod = workload["spec"]["template"]["spec"]
    return {container["name"]: container for container in [*pod.get("initContainers", []), *pod["containers"]]}


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {variable["name"]: variable.get("value") for variable in container["env"]}


def mounts(container: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    return {mount["name"]: (mount["mountPath"], mount.get("readOnly", False)) for mount in container["volumeMounts"]}


def test_vllm_finds_the_probe_and_both_find_its_files(
    pairs: list[tuple[Document, Document]], subtests: pytest.Subtests
) -> None:
    for pair in pairs:
        with subtests.test(workload=pair[0]["metadata"]["name"]):
            pod_containers = containers(pair[1])
            vllm, sidecar, installer = (pod_containers[name] for name in ("vllm", "headroom", "headroom-probe"))

            assert environment(vllm).items() >= {"PYTHONPATH": PATH, "HEADROOM_PROBE_DIR": FOLDER}.items()
            assert environment(sidecar)["HEADROOM_PROBE_DIR"] == FOLDER
            assert mounts(vllm)[FILES] == mounts(sidecar)[FILES] == (FOLDER, False)
            assert (mounts(installer)[CODE], mounts(vllm)[CODE]) == ((PATH, False), (PATH, True))
            assert CODE not in mounts(sidecar), "who writes there has its code run by vLLM"
            assert f"probe install {PATH}" in installer["command"][-1]


def test_nothing_else_changes(pairs: list[tuple[Document, Document]], subtests: pytest.Subtests) -> None:
    for pair in pairs:
        with subtests.test(workload=pair[0]["metadata"]["name"]):
            ours = {
                *((*POD, "containers", "vllm", "env", name) for name in ("PYTHONPATH", "HEADROOM_PROBE_DIR")),
                *((*POD, "containers", "vllm", "volumeMounts", path) for path in (PATH, FOLDER, CODE, FILES)),
            }
            changed = {
                way
                for way in differences(*pair)
                if way not in ours
                and way[:-1] not in ours
                and not (way[:3] == POD and way[4:] and way[4].startswith("headroom"))
            }

            assert changed == set()


def test_an_installation_that_fails_holds_nothing_back(
    pairs: list[tuple[Document, Document]], subtests: pytest.Subtests
) -> None:
    for pair in pairs:
        with subtests.test(workload=pair[0]["metadata"]["name"]):
            installer = containers(pair[1])["headroom-probe"]

            assert installer["command"][:2] == ["sh", "-c"]
            assert installer["command"][2].endswith(" || true")
            assert "restartPolicy" not in installer
            assert installer["securityContext"] == containers(pair[1])["headroom"]["securityContext"]
            assert installer["resources"] == containers(pair[1])["headroom"]["resources"]


def test_the_volumes_are_in_memory_and_bounded(
    pairs: list[tuple[Document, Document]], subtests: pytest.Subtests
) -> None:
    for pair in pairs:
        with subtests.test(workload=pair[0]["metadata"]["name"]):
            volumes = {
                volume["name"]: volume.get("emptyDir") for volume in pair[1]["spec"]["template"]["spec"]["volumes"]
            }

            assert all(volumes[name]["medium"] == "Memory" and volumes[name]["sizeLimit"] for name in (CODE, FILES))


def test_it_is_valid(pairs: list[tuple[Document, Document]], subtests: pytest.Subtests) -> None:
    for pair in pairs:
        with subtests.test(workload=pair[0]["metadata"]["name"]):
            assert [fault for version in schemas.versions() for fault in schemas.faults(pair[1], version)] == []


def test_it_comes_after_the_sidecar(tmp_path: Path) -> None:
    components = [COMPONENTS / "probe", COMPONENTS / "sidecar"]
    built = build(kustomization(tmp_path, resource=WORKLOADS["a Deployment"].folder, components=components))

    assert built.returncode != 0
    assert "/spec/template/spec/shareProcessNamespace" in built.stderr
