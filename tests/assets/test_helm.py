"""The chart says what the Kustomize components say: by what Helm made of it, and anew where there is Helm."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from jsonschema import Draft7Validator

from alerts.generate import with_links
from tests.assets.kubernetes import helm, schemas
from tests.assets.kubernetes.difference import leaves
from tests.assets.kubernetes.rendering import (
    COMPONENTS,
    HERE,
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

CHART: Final[dict[str, Any]] = yaml.safe_load((helm.CHART / "Chart.yaml").read_text())
VALUES: Final[dict[str, Any]] = yaml.safe_load((helm.CHART / "values.yaml").read_text())
SCHEMA: Final[dict[str, Any]] = json.loads((helm.CHART / "values.schema.json").read_text())

DIGEST: Final = "sha256:" + "0123456789abcdef" * 4
CASES: Final[dict[str, dict[str, Any]]] = {
    "runtime-class": {},
    "dra": {
        "sidecar": {"gpu": "dra", "env": {"HEADROOM_LOG_FORMAT": "json"}, "image": {"digest": DIGEST}},
        "addresses": {"runbooks": "https://docs.your.org/"},
    },
    "nri": {
        "sidecar": {
            "gpu": "nri",
            "image": {"repository": "registry.example/headroom", "tag": "0.1.1"},
            "memoryLimitOf": "vllm",
        },
        "podMonitor": {"interval": "30s", "labels": {"release": None, "prometheus": "gpu"}},
        "prometheusRule": {"enabled": False},
        "dashboards": {"enabled": False},
        "networkPolicy": {"enabled": True, "prometheusNamespace": "observability"},
    },
    "amd": {"sidecar": {"gpu": "amd", "evict": "dry-run"}},
}
NO_SIDECARS: Final = ({"gpu": "all"}, {"env": {"A": "1"}}, {"memoryLimitOf": "{vllm}"}, {"evict": "yes"})
each_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(scope="module")
def renderer() -> list[str]:
    command = helm.command()
    if command is None:
        pytest.skip("neither helm nor helm-sdkpy (HELM_PYTHON) is there: the chart is not rendered")
    return command


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return helm.parent(tmp_path_factory.mktemp("engine"))


def written(case: str) -> str:
    return (HERE / "helm-rendered" / f"{case}.yaml").read_text()


def container(case: str) -> dict[str, Any]:
    pod = find(documents(written(case)), "Deployment")["spec"]["template"]["spec"]
    (found,) = pod["initContainers"]
    return dict(found)


@each_case
def test_what_helm_made_of_the_chart_is_written_down(
    case: str, renderer: list[str], parent: Path, golden: Golden
) -> None:
    made = helm.render(renderer, parent, {"vllm-headroom": CASES[case]})
    assert made.returncode == 0, made.stderr
    texts = [text for text in made.stdout.split("---\n") if text.strip() and not is_copy(read_yaml(text))]
    head = f"# What Helm makes of the chart whose files have the digest {helm.digest()}\n"

    golden(
        HERE / "helm-rendered" / f"{case}.yaml", head + "---\n".join(sorted(text.rstrip("\n") + "\n" for text in texts))
    )


def is_copy(document: Document) -> bool:
    return document["kind"] in {"PrometheusRule", "ConfigMap"}


def test_the_rules_and_the_dashboards_arrive_whole(renderer: list[str]) -> None:
    made = helm.render(renderer, helm.CHART, {})
    assert made.returncode == 0, made.stderr
    found = documents(made.stdout)
    maps = {each["metadata"]["name"]: each["data"] for each in found if each["kind"] == "ConfigMap"}
    rules = read_yaml((REPOSITORY / "alerts" / "prometheusrule.yaml").read_text())

    assert find(found, "PrometheusRule") == rules
    assert maps == {
        f"{path.stem}-dashboard": {path.name: path.read_text().rstrip("\n")}
        for path in (REPOSITORY / "dashboards").glob("*.json")
    }
    assert [fault for each in found for fault in schemas.faults(each, schemas.versions()[-1])] == []


@pytest.mark.parametrize("runbooks", ["https://git.your.org/runbooks/{alert}.md", "https://docs.your.org"])
def test_an_address_gives_every_alert_its_link(renderer: list[str], runbooks: str) -> None:
    made = helm.render(
        renderer, helm.CHART, {"addresses": {"runbooks": runbooks, "grafana": "http://grafana.your.org/g/"}}
    )
    rules = (REPOSITORY / "alerts" / "rules" / "headroom.yaml").read_text()
    wanted = with_links(rules, runbooks=runbooks, dashboards="http://grafana.your.org/g")

    assert made.returncode == 0, made.stderr
    assert find(documents(made.stdout), "PrometheusRule")["spec"] == read_yaml(wanted)


@pytest.mark.parametrize(
    "wrong",
    [{"addresses": {"grafana": "grafana.your.org"}}, {"dashboard": {}}, *({"sidecar": each} for each in NO_SIDECARS)],
)
def test_helm_refuses_values_that_there_are_not(renderer: list[str], wrong: dict[str, Any]) -> None:
    made = helm.render(renderer, helm.CHART, wrong)

    assert made.returncode != 0
    assert "values don't meet the specifications of the schema" in made.stderr


@each_case
def test_what_is_written_down_is_of_the_chart_as_it_is(case: str) -> None:
    assert helm.digest() in written(case), "the chart has changed: render it anew, as deploy/helm/README.md says"


@needs_kustomize
@each_case
def test_the_sidecar_is_the_one_of_the_components(case: str, tmp_path: Path) -> None:
    folder = HERE / "workloads" / "statefulset"
    values = CASES[case].get("sidecar", {})
    components = [COMPONENTS / "sidecar", COMPONENTS / f"gpu-{case}"]
    components += [COMPONENTS / "memory-limit"] if values.get("memoryLimitOf") else []
    components += [COMPONENTS / "evict"] if "evict" in values else []
    built = documents(rendered(kustomization(tmp_path, resource=folder, components=components)))
    pod = find(built, "StatefulSet", "engine")["spec"]["template"]["spec"]
    (expected,) = pod["initContainers"]
    image = {"repository": "ghcr.io/vllm-headroom/vllm-headroom", "tag": "0.1.0"} | values.get("image", {})
    end = f"@{image['digest']}" if "digest" in image else f":{image['tag']}"
    expected |= {"image": image["repository"] + end, "imagePullPolicy": "IfNotPresent"}
    runbooks = CASES[case].get("addresses", {}).get("runbooks")
    expected["env"] += [{"name": "HEADROOM_RUNBOOKS_URL", "value": f"{runbooks}{{alert}}"}] if runbooks else []
    expected["env"] += [{"name": name, "value": value} for name, value in values.get("env", {}).items()]

    assert leaves(container(case)) == leaves(expected)
    volumes = find(documents(written(case)), "Deployment")["spec"]["template"]["spec"]["volumes"]
    assert volumes == [each for each in pod["volumes"] if each["name"].startswith("headroom")]


def test_what_may_evict_is_what_the_component_grants() -> None:
    granted = documents((COMPONENTS / "evict" / "rbac.yaml").read_text())
    granted[-1]["subjects"][0]["namespace"] = "vllm"
    kinds = [each["kind"] for each in granted]

    assert [find(documents(written("amd")), kind) for kind in kinds] == granted
    assert not any(each["kind"] in kinds for each in documents(written("dra")))


def test_what_watches_is_what_the_components_install() -> None:
    monitor, policy = (
        yaml.safe_load((COMPONENTS / name / f"{name}.yaml").read_text()) for name in ("podmonitor", "networkpolicy")
    )
    assert find(documents(written("runtime-class")), "PodMonitor") == monitor

    asked = documents(written("nri"))
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    endpoint["interval"] = "30s"
    monitor["metadata"]["labels"] = {"prometheus": "gpu"}
    (namespace,) = policy["spec"]["ingress"][0]["from"]
    namespace["namespaceSelector"]["matchLabels"] = {"kubernetes.io/metadata.name": "observability"}
    assert find(asked, "PodMonitor") == monitor
    assert find(asked, "NetworkPolicy") == policy
    assert not any(each["kind"] == "NetworkPolicy" for each in documents(written("runtime-class")))


@each_case
def test_what_helm_made_is_valid(case: str) -> None:
    found = documents(written(case))
    versions = [each for each in schemas.versions() if case != "dra" or each != "1.29"]

    assert [fault for each in found for version in versions for fault in schemas.faults(each, version)] == []


def test_the_values_are_what_their_schema_says_and_every_one_is_in_it() -> None:
    Draft7Validator.check_schema(SCHEMA)

    assert list(Draft7Validator(SCHEMA).iter_errors(VALUES)) == []
    assert unknown(VALUES, SCHEMA) == []


def unknown(values: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    found: list[str] = []
    for name, value in values.items():
        known = schema["properties"].get(name)
        if known is None:
            found.append(name)
        elif "properties" in known:
            found += unknown(value, known)
    return found


def test_the_chart_is_of_this_version() -> None:
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]

    assert (CHART["apiVersion"], CHART["name"], CHART["type"]) == ("v2", "vllm-headroom", "application")
    assert CHART["version"] == CHART["appVersion"] == version
    assert CHART["kubeVersion"] == ">=1.29.0-0"


def test_what_the_chart_links_to_is_there() -> None:
    linked = {path.relative_to(helm.CHART): path.resolve() for path in helm.CHART.rglob("*") if path.is_symlink()}

    assert linked == {Path("files/prometheusrule.yaml"): REPOSITORY / "alerts" / "prometheusrule.yaml"} | {
        Path("files/dashboards") / path.name: path for path in (REPOSITORY / "dashboards").glob("*.json")
    }
