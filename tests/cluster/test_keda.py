"""KEDA scales by the shipped ScaledObject: up under a queue, down without one, and not for an engine that leaks."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import yaml

from tests.assets.kubernetes.rendering import COMPONENTS
from tests.cluster.cluster import FOLDER, IS_OWN_CLUSTER, NODE, START_SECONDS, Workload, read
from tests.cluster.guardrail import Simulation, build_workload
from tests.cluster.keda import ADAPTER, run_keda
from tests.e2e.paging import free_addresses, running
from tests.process import NO_TLS, eventually

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not IS_OWN_CLUSTER or not ADAPTER.exists(), reason="KEDA runs beside a cluster of our own"),
]

PROMETHEUS: Final = FOLDER / "images" / "prometheus"
"""Built with its discovery of pods, which Debian's has not."""

FACTOR: Final = 15
"""By what the waiting times of the ScaledObject are divided, so that ten minutes take 40 s."""

SCALE_SECONDS: Final = 300.0
STEADY_SECONDS: Final = 60.0
"""How long nothing may change: four polls of KEDA's, and longer than its waiting times."""

LOOK_SECONDS: Final = 2.0
LEAK: Final = Simulation(
    speed=30,
    sample_interval_seconds=120,
    sidecar_settings={"BEGAN": "now", "CLOCK_APART": "0", "LEAK_FACTOR": "3", "HEADROOM_EVICT": "off"},
    engine_settings={"ENGINE_LOAD_SECONDS": "0", "ENGINE_FOLLOWS": "http://127.0.0.1:9839/metrics"},
)
"""A leak that is certain after three minutes; it leaves half an hour of the simulated time three minutes later."""

LOW_THRESHOLD: Final = "0.01"
"""The share of an engine's places that are taken, at which any engine that counts has a replica added."""

CONFIG: Final = """
global: {{scrape_interval: 5s, scrape_timeout: 5s}}
scrape_configs:
- job_name: vllm-headroom
  kubernetes_sd_configs:
  - {{role: pod, kubeconfig_file: {config}, namespaces: {{names: [{namespaces}]}}}}
  relabel_configs:
  - {{source_labels: [__meta_kubernetes_pod_container_port_name], regex: headroom, action: keep}}
  - {{source_labels: [__meta_kubernetes_namespace], target_label: namespace}}
  - {{source_labels: [__meta_kubernetes_pod_name], target_label: pod}}
"""


@contextmanager
def run_prometheus(folder: Path, namespaces: list[str]) -> Iterator[str]:
    """Run a Prometheus on the sidecars of these namespaces until the end; yield its address."""
    address, _ = free_addresses()
    text = CONFIG.format(config=NODE / "admin.conf", namespaces=", ".join(namespaces))
    (folder / "prometheus.yml").write_text(text)
    options = (f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}")
    with running(address, folder / "prometheus.log", str(PROMETHEUS), *options):
        yield address


def query(address: str, text: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"http://{address}/api/v1/query", params={"query": text}, timeout=30, verify=NO_TLS)
    result: list[dict[str, Any]] = answer.json()["data"]["result"]
    return result


def divide_waiting_times(behaviour: dict[str, Any]) -> None:
    for direction in behaviour.values():
        direction["stabilizationWindowSeconds"] //= FACTOR
        for policy in direction["policies"]:
            policy["periodSeconds"] //= FACTOR


def apply_scaled_object(
    workload: Workload, prometheus_address: str, fewest_replicas: int, room_threshold: str = ""
) -> None:
    """Apply the shipped ScaledObject, with the names changed as its component says, and a threshold if there is one."""
    text = (COMPONENTS / "keda" / "scaledobject.yaml").read_text()
    scaled: dict[str, Any] = yaml.safe_load(text.replace('namespace="vllm"', f'namespace="{workload.namespace}"'))
    for trigger in scaled["spec"]["triggers"]:
        trigger["metadata"]["serverAddress"] = f"http://{prometheus_address}"
        if trigger["name"] == "room" and room_threshold:
            trigger["metadata"]["threshold"] = room_threshold
    divide_waiting_times(scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"])
    scaled["spec"]["minReplicaCount"] = fewest_replicas
    workload.kubectl("apply", "--server-side", "--filename=-", input_text=json.dumps(scaled))


def count_replicas(workload: Workload) -> int:
    return int(read("deployment/vllm", "--namespace", workload.namespace)["spec"]["replicas"])


def has_all_metrics(workload: Workload) -> bool:
    """Return whether the autoscaler that KEDA made has an answer of each trigger."""
    autoscalers = read("horizontalpodautoscalers", "--namespace", workload.namespace)["items"]
    metrics = [metric for autoscaler in autoscalers for metric in autoscaler["status"].get("currentMetrics") or ()]
    return sum("external" in metric for metric in metrics) == 3


def watch_replicas(workload: Workload, seconds: float) -> set[int]:
    """Return every number of replicas that the workload was given in this time."""
    numbers = set()
    ends_seconds = time.monotonic() + seconds
    while time.monotonic() < ends_seconds:
        numbers.add(count_replicas(workload))
        time.sleep(LOOK_SECONDS)
    return numbers


def test_a_queue_adds_a_replica_and_its_end_removes_it_and_a_leak_does_neither(tmp_path: Path) -> None:
    busy = Workload(f"headroom-{uuid.uuid4().hex[:4]}-busy")
    (tmp_path / "keda").mkdir()
    with ExitStack() as stack:
        stack.callback(busy.delete)
        busy.apply(tmp_path, 1)
        stack.enter_context(run_keda(tmp_path / "keda"))
        leaky = build_workload(tmp_path, "leaky", 2, budgets=(), simulation=LEAK)
        stack.callback(leaky.delete)
        address = stack.enter_context(run_prometheus(tmp_path, [busy.namespace, leaky.namespace]))
        eventually(lambda: busy.is_ready(1) and leaky.is_ready(2), "all serve", START_SECONDS, LOOK_SECONDS)
        stack.callback(busy.kubectl, "delete", "scaledobject", "vllm")
        apply_scaled_object(busy, address, 1)
        eventually(lambda: has_all_metrics(busy), "KEDA answers", START_SECONDS, LOOK_SECONDS)

        leaking = f'count(headroom_leak_state{{state="leaking", namespace="{leaky.namespace}"}} == 1) == 2'
        eventually(lambda: query(address, leaking), "both leaks are certain", START_SECONDS, LOOK_SECONDS)
        stack.callback(leaky.kubectl, "delete", "scaledobject", "vllm")
        apply_scaled_object(leaky, address, 2, LOW_THRESHOLD)
        under_leak = watch_replicas(leaky, STEADY_SECONDS)
        leaky.kubectl("delete", "pod", leaky.pods()[0]["metadata"]["name"], "--wait=false")
        eventually(lambda: count_replicas(leaky) == 3, "one that does not leak counts", SCALE_SECONDS, LOOK_SECONDS)

        (queued,) = (pod["metadata"]["name"] for pod in busy.pods())
        busy.order_pod(queued, "queue 12")
        began_seconds = time.monotonic()
        eventually(lambda: count_replicas(busy) == 2, "a queue adds a replica", SCALE_SECONDS, LOOK_SECONDS)
        added_seconds = time.monotonic() - began_seconds
        busy.order_pod(queued, "queue 0", "idle")
        began_seconds = time.monotonic()
        eventually(lambda: count_replicas(busy) == 1, "its end removes it", SCALE_SECONDS, LOOK_SECONDS)
        removed_seconds = time.monotonic() - began_seconds

    report = f"a replica more after {added_seconds:.0f} s of a queue, one less {removed_seconds:.0f} s after its end"
    print(f"{report}; replicas while both engines leaked: {sorted(under_leak)}")  # noqa: T201 - the result
    assert under_leak == {2}
