"""The guardrail on a real API server whose certificates are as bare as those of EKS."""

from __future__ import annotations

import itertools
import json
import os
import time
import uuid
from contextlib import ExitStack
from functools import partial
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
TURNS_SECONDS: Final = 60.0
"""Enough for more refusals of the same request."""

TOKEN_SECONDS: Final = 600
"""The shortest time for which Kubernetes issues a token."""

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
          - name: headroom-api
            projected:
              sources:
              - serviceAccountToken: {{path: token, expirationSeconds: {token_seconds}}}
              - configMap: {{name: kube-root-ca.crt, items: [{{key: ca.crt, path: ca.crt}}]}}
              - downwardAPI: {{items: [{{path: namespace, fieldRef: {{fieldPath: metadata.namespace}}}}]}}
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


VERBS: Final = (
    "pods get",
    "pods/eviction create",
    "poddisruptionbudgets list",
    "leases get",
    "leases create",
    "leases update",
)
"""Each verb of the shipped Role."""


def build_workload(
    folder: Path, name: str, replicas: int, *, token_seconds: int = 3600, has_budget: bool = True
) -> Workload:
    """Apply replicas that leak, with the guardrail on; return their workload."""
    workload = Workload(f"headroom-{uuid.uuid4().hex[:4]}-{name}")
    workload.write_overlay(folder, replicas)
    place = folder / f"{name}-guarded"
    place.mkdir()
    component = os.path.relpath(ROOT / "deploy" / "kubernetes" / "components" / "evict", place)
    text = OVERLAY.format(
        namespace=workload.namespace, base=workload.namespace, component=component, token_seconds=token_seconds
    )
    (place / "kustomization.yaml").write_text(text if has_budget else text.replace("- budget.yaml\n", ""))
    (place / "budget.yaml").write_text(BUDGET)
    (place / "evicting.py").write_text((ROOT / "tests" / "e2e" / "evicting.py").read_text())
    kubectl("apply", "--server-side", "--kustomize", str(place))
    return workload


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


def test_one_pod_at_a_time_is_evicted_and_the_next_waits_for_its_replacement_alone(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    workload = build_workload(tmp_path, "guardrail", REPLICAS)
    request.addfinalizer(workload.delete)
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


def read_log(workload: Workload) -> list[str]:
    """Return the lines of the first pod's sidecar."""
    pods = workload.pods()
    if not pods:
        return []
    return workload.kubectl("logs", pods[0]["metadata"]["name"], "--container=headroom", check=False).splitlines()


def take_verb_away(workload: Workload, missing: str) -> None:
    """Change the shipped Role so that one verb of one resource is missing."""
    resource, verb = missing.split()
    role = read("role/vllm-headroom", "--namespace", workload.namespace)
    for rule in role["rules"]:
        if rule["resources"] == [resource]:
            rule["verbs"].remove(verb)
    role["rules"] = [rule for rule in role["rules"] if rule["verbs"]]
    workload.kubectl("replace", "--filename=-", given=json.dumps(role))


def find_refusals(workload: Workload) -> set[str]:
    """Return the refusals of the API server in the log, each without the reason to evict, which changes."""
    lines = (line.partition(" why=")[0].partition("problem=")[2] for line in read_log(workload))
    return {line for line in lines if "forbidden" in line}


def test_a_verb_that_is_missing_gives_one_clear_line(tmp_path: Path) -> None:
    workloads = {}
    with ExitStack() as stack:
        for number, missing in enumerate(VERBS):
            workload = build_workload(tmp_path, f"verb-{number}", 1)
            stack.callback(workload.delete)
            workloads[missing] = workload
            take_verb_away(workload, missing)
            if missing == "leases update":  # a Lease is changed where there is one
                lease = {
                    "apiVersion": "coordination.k8s.io/v1",
                    "kind": "Lease",
                    "metadata": {"name": LEASE, "namespace": workload.namespace},
                }
                kubectl("create", "--filename=-", given=json.dumps(lease))

        for missing, workload in workloads.items():
            has_refusal = partial(find_refusals, workload)
            eventually(has_refusal, f"a line of the log without {missing}", START_SECONDS, 2.0)
        time.sleep(TURNS_SECONDS)
        refusals = {missing: find_refusals(workload) for missing, workload in workloads.items()}

    for missing, problems in refusals.items():
        resource, verb = missing.split()
        print(f"without {missing}: {problems}")  # noqa: T201 - the result
        (problem,) = problems
        assert f'cannot {verb} resource \\"{resource}\\"' in problem


def test_the_guardrail_goes_on_with_the_token_that_the_kubelet_renews(tmp_path: Path) -> None:
    """It asks for a budget at each turn; one is there when the first token has expired."""
    with ExitStack() as stack:
        workload = build_workload(tmp_path, "token", 1, token_seconds=TOKEN_SECONDS, has_budget=False)
        stack.callback(workload.delete)
        eventually(
            lambda: any("no PodDisruptionBudgets select this pod" in line for line in read_log(workload)),
            "the sidecar looks for a budget",
            START_SECONDS,
            2.0,
        )
        (pod,) = workload.pods()
        time.sleep(TOKEN_SECONDS + 60)
        kubectl("apply", "--namespace", workload.namespace, "--filename=-", given=BUDGET)
        eventually(lambda: pod["metadata"]["name"] not in list_ready(workload), "it is evicted", START_SECONDS, 2.0)
