"""The charts say what the Kustomize components say: by what Helm made of them, and rendered again where it is."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from jsonschema import Draft7Validator

from alerts.generate import with_links
from tests.assets.kubernetes import helm, schemas
from tests.assets.kubernetes.combinations import WORKLOADS
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
from tests.fakes.api_server.cluster import ROLE
from vllm_headroom.config import Settings, name_variable
from vllm_headroom_tools.sources import CONFIG

CHARTS: Final = (helm.CHART, helm.CLUSTER)

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
        "podMonitor": {
            "interval": "1m30s",
            "labels": {"release": None, "prometheus": "gpu"},
            "podTargetLabels": ["team"],
        },
        "networkPolicy": {"enabled": True, "prometheusNamespace": "observability"},
    },
    "amd": {"sidecar": {"gpu": "amd", "evict": "dry-run"}},
}
LOOPBACK: Final = ("127.0.0.1", "127.1", "::1", "0:0:0:0:0:0:0:1", "::ffff:127.0.0.1", "localhost")
NO_SIDECARS: Final[tuple[dict[str, Any], ...]] = (
    *({"gpu": "all"}, {"env": {"A": "1"}}, {"memoryLimitOf": "{vllm}"}, {"evict": "yes"}),
    *({"extraVolumes": {}}, {"extraVolumeMounts": [{"name": "files"}]}),
    *({"env": {"HEADROOM_LISTEN_HOST": host}} for host in LOOPBACK),
)
OWN: Final = ("engines", "state_dir", "role", "probe_dir", "evict", "runbooks_url", "listen_port")
"""Settings that the chart sets itself, or that its port would not follow."""
NO_VALUES: Final = (
    *((helm.CHART, name) for name in ("mode", "node", "sidecar", "addresses", "podMonitor", "networkPolicy")),
    *((helm.CLUSTER, name) for name in ("addresses", "prometheusRule", "dashboards")),
    (helm.CHART, "networkPolicy.prometheusNamespace"),
    (helm.CLUSTER, "prometheusRule.alerts"),
)
each_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return helm.parent(tmp_path_factory.mktemp("engine"))


def read_rendered(case: str) -> str:
    return (HERE / "helm-rendered" / f"{case}.yaml").read_text()


def container(case: str) -> dict[str, Any]:
    pod = find(documents(read_rendered(case)), "Deployment")["spec"]["template"]["spec"]
    (init_container,) = pod["initContainers"]
    return dict(init_container)


@each_case
def test_what_helm_made_of_the_chart_is_written_down(case: str, parent: Path, golden: Golden) -> None:
    write_down(HERE / "helm-rendered" / f"{case}.yaml", parent, CASES[case], golden)


def write_down(path: Path, parent: Path, values: dict[str, Any], golden: Golden) -> None:
    texts = [text for text in helm.render(parent, {"vllm-headroom": values}).split("---\n") if text.strip()]
    head = f"# What Helm makes of the chart whose files have the digest {helm.digest()}\n"

    golden(path, head + "---\n".join(sorted(text.rstrip("\n") + "\n" for text in texts)))


def test_the_state_may_outlive_the_pod_and_the_cluster_may_choose_the_user(parent: Path) -> None:
    values = {"sidecar": {"stateClaim": "vllm-state", "anyUser": True}}
    manifests = documents(helm.render(parent, {"vllm-headroom": values}))
    pod = find(manifests, "Deployment")["spec"]["template"]["spec"]
    (sidecar,) = pod["initContainers"]

    assert {"name": "headroom-state", "persistentVolumeClaim": {"claimName": "vllm-state"}} in pod["volumes"]
    assert sidecar["securityContext"]["runAsNonRoot"] is True
    assert not sidecar["securityContext"].keys() & {"runAsUser", "runAsGroup"}


def test_helm_test_runs_the_image_of_the_sidecar_as_the_sidecar_runs(parent: Path) -> None:
    manifests = documents(helm.render(parent, {}))
    (test,) = documents(helm.render_hooks(parent, {}))
    assert [fault for version in schemas.versions() for fault in schemas.faults(test, version)] == []
    (container,) = test["spec"]["containers"]
    (sidecar,) = find(manifests, "Deployment")["spec"]["template"]["spec"]["initContainers"]

    assert test["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert container["image"] == sidecar["image"]
    assert container["securityContext"] == sidecar["securityContext"]


def test_the_charts_have_an_icon_that_is_here() -> None:
    for chart in CHARTS:
        icon = yaml.safe_load((chart / "Chart.yaml").read_text())["icon"]

        assert icon.startswith("https://raw.githubusercontent.com/vllm-headroom/vllm-headroom/main/")
        assert (REPOSITORY / icon.partition("/main/")[2]).is_file()


def rules(manifests: list[Document]) -> dict[str, Any]:
    """Return the alerts by their names."""
    groups = find(manifests, "PrometheusRule")["spec"]["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def test_the_rules_and_the_dashboards_arrive_whole() -> None:
    manifests = documents(helm.render(helm.CLUSTER, {}))
    maps = {manifest["metadata"]["name"]: manifest["data"] for manifest in manifests if manifest["kind"] == "ConfigMap"}

    assert find(manifests, "PrometheusRule") == read_yaml((REPOSITORY / "alerts" / "prometheusrule.yaml").read_text())
    assert maps == {
        f"{path.stem}-dashboard": {path.name: path.read_text().rstrip("\n")}
        for path in (REPOSITORY / "dashboards").glob("*.json")
    }
    assert [
        fault for manifest in manifests for version in schemas.versions() for fault in schemas.faults(manifest, version)
    ] == []


@pytest.mark.parametrize("runbooks", ["https://git.your.org/runbooks/{alert}.md", "https://docs.your.org"])
def test_an_address_gives_every_alert_its_link(runbooks: str) -> None:
    rendered_text = helm.render(
        helm.CLUSTER, {"addresses": {"runbooks": runbooks, "grafana": "http://grafana.your.org/g/"}}
    )
    source = (REPOSITORY / "alerts" / "rules" / "headroom.yaml").read_text()
    wanted = with_links(source, runbooks=runbooks, dashboards="http://grafana.your.org/g")

    assert find(documents(rendered_text), "PrometheusRule")["spec"] == read_yaml(wanted)


def test_an_alert_is_left_out_or_has_what_its_value_says_and_the_others_stay() -> None:
    rules_before = rules(documents(helm.render(helm.CLUSTER, {})))
    mine = {
        "HeadroomGpuMemoryGrowing": {"enabled": False},
        "HeadroomGpuMemoryLeak": {
            "for": "30m",
            "labels": {"severity": "warning", "team": "serving"},
            "thresholds": {"seconds": 43200},
        },
    }
    rules_after = rules(documents(helm.render(helm.CLUSTER, {"prometheusRule": {"alerts": mine}})))
    leak = rules_before["HeadroomGpuMemoryLeak"]
    wanted = leak | {"for": "30m", "labels": leak["labels"] | {"severity": "warning", "team": "serving"}}
    wanted["expr"] = leak["expr"].replace("86400 # seconds\n", "43200 # seconds\n")
    assert wanted["expr"] != leak["expr"]
    remaining_rules = {name: rule for name, rule in rules_before.items() if name != "HeadroomGpuMemoryGrowing"}

    assert rules_after == remaining_rules | {"HeadroomGpuMemoryLeak": wanted}


def test_helm_refuses_values_that_there_are_not(subtests: pytest.Subtests) -> None:
    wrong_values: list[dict[str, Any]] = [
        {"addresses": {"runbooks": "git.your.org"}},
        {"dashboard": {}},
        *({"sidecar": sidecar} for sidecar in NO_SIDECARS),
        *({"podMonitor": {"interval": interval}} for interval in ("0s", "0m0s", "", "1s1m")),
        {"podMonitor": {"endpoint": {"path": "/"}}},
    ]
    for wrong in wrong_values:
        with subtests.test(wrong=wrong):
            assert "values don't meet the specifications of the schema" in helm.refusal(helm.CHART, wrong)


def test_the_sidecar_listens_where_a_kubelet_reaches_it(subtests: pytest.Subtests) -> None:
    for host in ["", "0.0.0.0", "::", "10.0.0.1", "fd00::1", "localhost.your.org"]:
        with subtests.test(host=host):
            schema = json.loads((helm.CHART / "values.schema.json").read_text())["properties"]["sidecar"]["properties"][
                "env"
            ]

            assert Draft7Validator(schema).is_valid({"HEADROOM_LISTEN_HOST": host})


def test_helm_says_in_one_line_which_value_is_missing(subtests: pytest.Subtests) -> None:
    for chart, name in NO_VALUES:
        with subtests.test(chart=chart.name, name=name):
            section, _, key = name.partition(".")

            assert f"missing property '{key or section}'" in helm.refusal(
                chart, {section: {key: None} if key else None}
            )


def test_the_environment_takes_every_setting_that_the_chart_does_not_set_itself() -> None:
    schema = json.loads((helm.CHART / "values.schema.json").read_text())
    allowed_names = schema["properties"]["sidecar"]["properties"]["env"]["propertyNames"]["enum"]

    assert allowed_names == sorted(name_variable(name) for name in {*Settings.model_fields, CONFIG} - set(OWN))


@pytest.mark.parametrize(("gpus", "limit"), [("0", "64GiB"), ("", "")], ids=["set", "empty"])
def test_a_setting_of_the_environment_replaces_the_charts(parent: Path, gpus: str, limit: str) -> None:
    own = {"HEADROOM_GPUS": gpus, "HEADROOM_HOST_MEMORY_LIMIT_BYTES": limit}
    values = {"sidecar": {"gpu": "dra", "memoryLimitOf": "vllm", "env": own}}
    deployment = find(documents(helm.render(parent, {"vllm-headroom": values})), "Deployment")
    (sidecar,) = deployment["spec"]["template"]["spec"]["initContainers"]

    assert [variable for variable in sidecar["env"] if variable["name"] in own] == [
        {"name": name, "value": value} for name, value in own.items()
    ]


def test_the_readmes_files_are_mounted_and_a_web_configuration_changes_the_probe_and_the_scrape(parent: Path) -> None:
    (text,) = re.findall(r"```yaml\n( +vllm-headroom:\n.*?\n) +```", (helm.FOLDER / "README.md").read_text(), re.DOTALL)
    values = yaml.safe_load(text)["vllm-headroom"]
    manifests = documents(helm.render(parent, {"vllm-headroom": values}))
    pod = find(manifests, "Deployment")["spec"]["template"]["spec"]
    (sidecar,) = pod["initContainers"]
    (endpoint,) = find(manifests, "PodMonitor")["spec"]["podMetricsEndpoints"]
    env = [{"name": name, "value": value} for name, value in values["sidecar"]["env"].items()]

    assert [variable for variable in sidecar["env"] if variable in env] == env
    assert pod["volumes"][-1:] == values["sidecar"]["extraVolumes"]
    assert sidecar["volumeMounts"][-1:] == values["sidecar"]["extraVolumeMounts"]
    assert sidecar["livenessProbe"]["tcpSocket"] == {"port": "headroom"}
    assert "httpGet" not in sidecar["livenessProbe"]
    assert values["podMonitor"]["endpoint"].items() <= endpoint.items()
    assert [
        fault for manifest in manifests for version in schemas.versions() for fault in schemas.faults(manifest, version)
    ] == []


@pytest.mark.parametrize("resources", [None, {"requests": None, "limits": None}], ids=["null", "empty"])
def test_a_sidecar_without_requests_and_limits_still_claims_its_gpu(resources: Any, parent: Path) -> None:
    values = {"sidecar": {"gpu": "dra", "resources": resources}}
    deployment = find(documents(helm.render(parent, {"vllm-headroom": values})), "Deployment")
    (sidecar,) = deployment["spec"]["template"]["spec"]["initContainers"]

    assert sidecar["resources"] == {"claims": [{"name": "gpu"}]}


def test_helm_refuses_a_duration_that_prometheus_would_refuse(subtests: pytest.Subtests) -> None:
    for wrong in ["30s5m", "5m5m", "1ms1s", "", "1", "1.5h", "-1m"]:
        for key in ["for", "keep_firing_for"]:
            with subtests.test(wrong=wrong, key=key):
                values = {"prometheusRule": {"alerts": {"HeadroomGpuMemoryLeak": {key: wrong}}}}

                assert "values don't meet the specifications of the schema" in helm.refusal(helm.CLUSTER, values)


def test_helm_takes_a_duration_that_prometheus_takes(subtests: pytest.Subtests) -> None:
    for right in ["1y2w3d4h5m6s7ms", "90m", "1h30m", "0s", "0"]:
        with subtests.test(right=right):
            values = {"prometheusRule": {"alerts": {"HeadroomGpuMemoryLeak": {"for": right}}}}

            assert rules(documents(helm.render(helm.CLUSTER, values)))["HeadroomGpuMemoryLeak"]["for"] == right


def test_helm_refuses_an_alert_that_there_is_not() -> None:
    wrong = {"prometheusRule": {"alerts": {"HeadroomNothing": {"enabled": False}}}}
    unknown = {"prometheusRule": {"alerts": {"HeadroomGpuMemoryLeak": {"thresholds": {"celsius": 1}}}}}

    assert "prometheusRule.alerts: there is no alert HeadroomNothing" in helm.refusal(helm.CLUSTER, wrong)
    assert "HeadroomGpuMemoryLeak.thresholds: there is no celsius" in helm.refusal(helm.CLUSTER, unknown)


def test_what_is_written_down_is_of_the_chart_as_it_is(subtests: pytest.Subtests) -> None:
    for case in CASES:
        with subtests.test(case=case):
            assert helm.digest() in read_rendered(case), (
                "the chart has changed: render it again, as deploy/helm/README.md says"
            )


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
    volumes = find(documents(read_rendered(case)), "Deployment")["spec"]["template"]["spec"]["volumes"]
    assert volumes == [volume for volume in pod["volumes"] if volume["name"].startswith("headroom")]


def test_what_may_evict_is_what_the_component_grants() -> None:
    text = (COMPONENTS / "evict" / "rbac.yaml").read_text().replace("name: vllm-headroom", "name: headroom-headroom")
    granted = documents(text)
    granted[-1]["subjects"][0]["namespace"] = "vllm"
    kinds = [manifest["kind"] for manifest in granted]

    assert [find(documents(read_rendered("amd")), kind) for kind in kinds] == granted
    assert not any(document["kind"] in kinds for document in documents(read_rendered("dra")))


@pytest.mark.parametrize("evict", ["off", "on"])
def test_the_log_is_granted_beside_evictions_or_alone(evict: str) -> None:
    manifests = documents(helm.render(helm.CHART, {"sidecar": {"engineLog": True, "evict": evict}}))
    granted = {
        f"{verb} {kind}"
        for rule in find(manifests, "Role")["rules"]
        for verb in rule["verbs"]
        for kind in rule["resources"]
    }

    assert {"get pods", "get pods/log"} <= granted
    assert ("create pods/eviction" in granted) == (evict == "on")


def test_no_value_for_evict_grants_nothing() -> None:
    manifests = documents(helm.render(helm.CHART, {"sidecar": {"evict": None}}))

    assert not [
        manifest["kind"] for manifest in manifests if manifest["kind"] in ("ServiceAccount", "Role", "RoleBinding")
    ]


def test_what_watches_is_what_the_components_install_for_the_pods_of_the_release() -> None:
    monitor, policy = (
        yaml.safe_load((COMPONENTS / name / f"{name}.yaml").read_text()) for name in ("podmonitor", "networkpolicy")
    )
    pods = {"matchLabels": {"vllm-headroom": "enabled", "vllm-headroom/release": "headroom"}}
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    job = {"sourceLabels": ["__meta_kubernetes_namespace"], "targetLabel": "job", "replacement": "$1/vllm-headroom"}
    endpoint["relabelings"] = [job]
    monitor["metadata"]["name"] = policy["metadata"]["name"] = "headroom-headroom"
    monitor["spec"]["selector"] = policy["spec"]["podSelector"] = pods
    assert find(documents(read_rendered("runtime-class")), "PodMonitor") == monitor

    manifests = documents(read_rendered("nri"))
    endpoint["interval"] = "1m30s"
    monitor["metadata"]["labels"] = {"prometheus": "gpu"}
    monitor["spec"]["podTargetLabels"] = ["team"]
    (namespace,) = policy["spec"]["ingress"][0]["from"]
    namespace["namespaceSelector"]["matchLabels"] = {"kubernetes.io/metadata.name": "observability"}
    assert find(manifests, "PodMonitor") == monitor
    assert find(manifests, "NetworkPolicy") == policy
    assert not any(document["kind"] == "NetworkPolicy" for document in documents(read_rendered("runtime-class")))


def test_what_helm_made_is_valid(subtests: pytest.Subtests) -> None:
    for case in CASES:
        with subtests.test(case=case):
            manifests = documents(read_rendered(case))
            versions = [version for version in schemas.versions() if case != "dra" or version != "1.29"]

            assert [
                fault for manifest in manifests for version in versions for fault in schemas.faults(manifest, version)
            ] == []


def test_the_values_are_what_their_schema_says_and_every_one_is_in_it(subtests: pytest.Subtests) -> None:
    for chart in CHARTS:
        with subtests.test(chart.name):
            values = yaml.safe_load((chart / "values.yaml").read_text())
            schema = json.loads((chart / "values.schema.json").read_text())
            Draft7Validator.check_schema(schema)

            assert list(Draft7Validator(schema).iter_errors(values)) == []
            assert unknown(values, schema) == []


def unknown(values: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    unknown_names: list[str] = []
    for name, value in values.items():
        property_schema = schema["properties"].get(name)
        if property_schema is None:
            unknown_names.append(name)
        elif "properties" in property_schema:
            unknown_names += unknown(value, property_schema)
    return unknown_names


def test_a_chart_is_of_this_version_and_has_what_artifact_hub_shows(subtests: pytest.Subtests) -> None:
    for chart in CHARTS:
        with subtests.test(chart.name):
            version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
            chart_document = yaml.safe_load((chart / "Chart.yaml").read_text())
            notes = chart_document["annotations"]

            assert (chart_document["apiVersion"], chart_document["name"], chart_document["type"]) == (
                "v2",
                chart.name,
                "application",
            )
            assert chart_document["version"] == chart_document["appVersion"] == version
            assert chart_document["kubeVersion"] == ">=1.29.0-0"
            assert notes["artifacthub.io/license"] == "Apache-2.0"
            assert all(
                image["image"].endswith(f":{version}")
                for image in yaml.safe_load(notes.get("artifacthub.io/images", "[]"))
            )


def test_what_the_charts_link_to_is_there() -> None:
    linked = {path.relative_to(helm.CLUSTER): path.resolve() for path in helm.FOLDER.rglob("*") if path.is_symlink()}

    assert linked == {Path("files/prometheusrule.yaml"): REPOSITORY / "alerts" / "prometheusrule.yaml"} | {
        Path("files/dashboards") / path.name: path for path in (REPOSITORY / "dashboards").glob("*.json")
    }


def test_the_mode_node_is_the_component_node() -> None:
    manifests = documents(helm.render(helm.CHART, {"mode": "node"}))
    component = documents(read_node())
    pods = [find(manifest_list, "DaemonSet")["spec"]["template"]["spec"] for manifest_list in (manifests, component)]
    (endpoint,) = find(manifests, "PodMonitor")["spec"]["podMetricsEndpoints"]
    daemon = find(manifests, "DaemonSet")

    assert leaves({**pods[0], "initContainers": [], "containers": []}) == leaves(
        {**pods[1], "initContainers": [], "containers": []}
    )
    for kind in ("initContainers", "containers"):
        ((chart_container,), (component_container,)) = (pod[kind] for pod in pods)
        usual = {"image", "imagePullPolicy", "resources", "env"}
        assert {key: value for key, value in chart_container.items() if key not in usual} == {
            key: value for key, value in component_container.items() if key not in usual
        }
        assert sorted(map(str, chart_container.get("env", ()))) == sorted(map(str, component_container.get("env", ())))
    assert endpoint["honorLabels"] is True
    monitor = yaml.safe_load((COMPONENTS / "node" / "podmonitor.yaml").read_text())
    assert endpoint["metricRelabelings"] == monitor["spec"]["podMetricsEndpoints"][0]["metricRelabelings"]
    selector = find(manifests, "PodMonitor")["spec"]["selector"]["matchLabels"]
    assert selector.items() <= daemon["spec"]["template"]["metadata"]["labels"].items()
    assert [
        fault for manifest in manifests for version in schemas.versions() for fault in schemas.faults(manifest, version)
    ] == []


@needs_kustomize
def test_the_cgroups_of_the_node_are_mounted_read_only_after_the_component_node(tmp_path: Path) -> None:
    kustomization(tmp_path, components=[COMPONENTS / "node", COMPONENTS / "node-cgroups"])

    pod = find(documents(rendered(tmp_path)), "DaemonSet")["spec"]["template"]["spec"]

    assert {"name": "cgroups", "hostPath": {"path": "/sys/fs/cgroup"}} in pod["volumes"]
    mount = {"name": "cgroups", "mountPath": "/host/sys/fs/cgroup", "readOnly": True}
    assert mount in pod["containers"][0]["volumeMounts"]
    assert mount not in pod["initContainers"][0]["volumeMounts"]
    # The chart has the same.
    chart_pod = find(documents(helm.render(helm.CHART, {"mode": "node", "node": {"cgroups": True}})), "DaemonSet")
    chart_pod = chart_pod["spec"]["template"]["spec"]
    assert chart_pod["volumes"] == pod["volumes"]
    assert chart_pod["containers"][0]["volumeMounts"] == pod["containers"][0]["volumeMounts"]


GUARDRAIL: Final = {"evict": "dry-run", "evictNamespaces": ["llm"]}


@needs_kustomize
@pytest.mark.parametrize(("name", "values"), [("node-evict", GUARDRAIL), ("node-probe", {"probe": True})])
def test_a_component_of_the_node_is_a_value_of_the_chart(name: str, values: dict[str, Any], tmp_path: Path) -> None:
    kustomization(tmp_path, components=[COMPONENTS / "node", COMPONENTS / name])
    component = find(documents(rendered(tmp_path)), "DaemonSet")["spec"]["template"]["spec"]
    manifests = documents(helm.render(helm.CHART, {"mode": "node", "node": values}))
    chart = find(manifests, "DaemonSet")["spec"]["template"]["spec"]

    assert chart["volumes"] == component["volumes"]
    assert [init.get("command") for init in chart["initContainers"]] == [
        init.get("command") for init in component["initContainers"]
    ]
    for key in ("volumeMounts", "env"):
        items = [sorted(pod["containers"][0][key], key=lambda item: str(item["name"])) for pod in (chart, component)]
        assert items[0] == items[1]
    assert [
        fault for manifest in manifests for version in schemas.versions() for fault in schemas.faults(manifest, version)
    ] == []


@needs_kustomize
def test_the_pod_of_an_engine_writes_its_probe_into_the_folder_that_the_nodes_sidecar_reads(tmp_path: Path) -> None:
    kustomization(tmp_path, resource=WORKLOADS["a Deployment"].folder, components=[COMPONENTS / "node-probe"])

    deployment = find(documents(rendered(tmp_path)), "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (vllm,) = (container for container in pod["containers"] if container["name"] == "vllm")
    daemon = find(documents(helm.render(helm.CHART, {"mode": "node", "node": {"probe": True}})), "DaemonSet")
    files = [
        next(volume for volume in volumes if volume["name"] == "headroom-probe-files")
        for volumes in (pod["volumes"], daemon["spec"]["template"]["spec"]["volumes"])
    ]

    mount = {"name": "headroom-probe-files", "mountPath": "/run/headroom-probe", "subPathExpr": "$(POD_UID)"}
    assert mount in vllm["volumeMounts"]
    assert {"name": "POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}} in vllm["env"]
    assert files[0] == files[1]
    assert [fault for version in schemas.versions() for fault in schemas.faults(deployment, version)] == []


def test_the_nodes_sidecar_may_evict_where_it_is_bound_and_with_the_verbs_that_are_used() -> None:
    manifests = documents(helm.render(helm.CHART, {"mode": "node", "node": GUARDRAIL}))
    account, role = documents((COMPONENTS / "node-evict" / "rbac.yaml").read_text())
    binding = find(manifests, "RoleBinding")
    chart_role = find(manifests, "ClusterRole")

    assert chart_role["rules"] == role["rules"]
    assert {f"{verb} {name}" for rule in role["rules"] for verb in rule["verbs"] for name in rule["resources"]} == ROLE
    assert (binding["metadata"]["namespace"], binding["roleRef"]["name"]) == ("llm", chart_role["metadata"]["name"])
    assert "ClusterRoleBinding" not in {manifest["kind"] for manifest in manifests}
    daemon = find(documents(read_node()), "DaemonSet")["metadata"]["name"]
    assert account["metadata"]["name"] == daemon


def test_by_default_the_nodes_sidecar_has_no_account_and_no_token() -> None:
    manifests = documents(helm.render(helm.CHART, {"mode": "node", "node": {"evictNamespaces": ["llm"]}}))

    assert {manifest["kind"] for manifest in manifests} == {"DaemonSet", "PodMonitor"}
    assert "serviceAccountToken" not in str(manifests)


def read_node() -> str:
    folder = COMPONENTS / "node"
    return "---\n".join((folder / name).read_text() for name in ("daemonset.yaml", "podmonitor.yaml"))


@pytest.mark.parametrize("sidecar", [{"probe": True}, {"evict": "on"}, {"memoryLimitOf": "vllm"}, {"gpu": "dra"}])
def test_the_mode_node_refuses_what_is_for_a_sidecar(sidecar: dict[str, Any]) -> None:
    assert "mode: node" in helm.refusal(helm.CHART, {"mode": "node", "sidecar": sidecar})
