"""The guardrail on a real API server whose certificates are as bare as those of EKS."""

from __future__ import annotations

import itertools
import json
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.cluster.cluster import ROOT, Workload, kubectl, read
from tests.process import eventually
from vllm_headroom.daemon.evict import LEASE_SECONDS

pytestmark = pytest.mark.cluster

REPLICAS: Final = 3
EVICTIONS: Final = 3
START_SECONDS: Final = 300.0
LOOK_SECONDS: Final = 1.0
LEASE: Final = "vllm-headroom-deployment-vllm"

OVERLAY: Final = """\
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: {namespace}
resources:
- ../{base}
- budget.yaml
components:
- {component}
configMapGenerator:
- {{name: evicting, files: [evicting.py]}}
patches:
- target: {{kind: Deployment, name: vllm}}
  patch: |-
    apiVersion: apps/v1
    kind: Deployment
    metadata: {{name: vllm}}
    spec:
      template:
        spec:
          initContainers:
          - name: headroom
            command: [/opt/vllm-headroom/bin/python3, /opt/evicting/evicting.py]
            args: [demo, --speed, "1000", --sample-interval-seconds, "60", --scenario, leak]
            env:
            - {{name: ACCOUNT, value: /var/run/secrets/kubernetes.io/serviceaccount}}
            - {{name: HEADROOM_EVICT, value: "on"}}
            - {{name: HEADROOM_EVICT_SECONDS, value: "86400"}}
            volumeMounts: [{{name: evicting, mountPath: /opt/evicting}}]
          containers:
          - name: vllm
            env: [{{name: ENGINE_LOAD_SECONDS, value: "40"}}]
          volumes:
          - {{name: evicting, configMap: {{name: evicting}}}}
"""
"""The demo's leak at 1,000 times real time, with the guardrail, RBAC, account and token as they are shipped.

A replacement loads for longer than the pod before it takes to end, as with a real model.
"""

BUDGET: Final = """\
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: vllm}
spec:
  maxUnavailable: 1
  selector: {matchLabels: {app.kubernetes.io/name: vllm}}
"""


@pytest.fixture
def workload(tmp_path: Path) -> Iterator[Workload]:
    workload = Workload(f"headroom-{uuid.uuid4().hex[:4]}-guardrail")
    workload.write_overlay(tmp_path, REPLICAS)
    place = tmp_path / "guarded"
    place.mkdir()
    component = os.path.relpath(ROOT / "deploy" / "kubernetes" / "components" / "evict", place)
    text = OVERLAY.format(namespace=workload.namespace, base=workload.namespace, component=component)
    (place / "kustomization.yaml").write_text(text)
    (place / "budget.yaml").write_text(BUDGET)
    (place / "evicting.py").write_text((ROOT / "tests" / "e2e" / "evicting.py").read_text())
    kubectl("apply", "--server-side", "--kustomize", str(place))
    yield workload
    workload.delete()


def list_ready(workload: Workload) -> set[str]:
    """Return the names of the pods that serve."""
    names = set()
    for pod in workload.pods():
        conditions = {each["type"]: each["status"] for each in pod["status"].get("conditions", ())}
        if conditions.get("Ready") == "True":
            names.add(pod["metadata"]["name"])
    return names


def read_lease(workload: Workload) -> dict[str, Any]:
    found = kubectl("--namespace", workload.namespace, "get", "lease", LEASE, "--output=json", check=False)
    spec: dict[str, Any] = json.loads(found)["spec"] if found.startswith("{") else {}
    return spec


def test_one_pod_at_a_time_is_evicted_and_the_next_waits_for_its_replacement_alone(workload: Workload) -> None:
    eventually(lambda: len(list_ready(workload)) == REPLICAS, "all serve", START_SECONDS)
    first_pods = {pod["metadata"]["name"] for pod in workload.pods()}
    fewest_ready = REPLICAS
    taken_seconds: list[float] = []
    holder = ""
    deadline = time.monotonic() + EVICTIONS * (LEASE_SECONDS + START_SECONDS)
    while len(taken_seconds) < EVICTIONS and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        fewest_ready = min(fewest_ready, len(list_ready(workload)))
        present_holder = read_lease(workload).get("holderIdentity", "")
        if present_holder and present_holder != holder:
            taken_seconds.append(time.monotonic())
        holder = present_holder or holder

    pauses = [round(later - earlier) for earlier, later in itertools.pairwise(taken_seconds)]
    print(f"seconds between evictions {pauses}, fewest ready {fewest_ready}")  # noqa: T201 - the result
    budget = read("poddisruptionbudget/vllm", "--namespace", workload.namespace)
    assert budget["status"]["expectedPods"] == REPLICAS
    assert len(taken_seconds) == EVICTIONS
    assert fewest_ready == REPLICAS - 1
    assert len(first_pods - {pod["metadata"]["name"] for pod in workload.pods()}) >= EVICTIONS - 1
    assert max(pauses) < LEASE_SECONDS, "the Lease was given back, and did not have to expire"
