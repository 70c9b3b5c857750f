"""Replicas that leak, with the guardrail of the shipped component on them."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Final

from tests.cluster.cluster import ROOT, SIDECAR_PATCH, Workload, kubectl

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
{sidecar_patch}            command: [/opt/vllm-headroom/bin/python3, /opt/evicting/evicting.py]
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
        namespace=workload.namespace,
        base=workload.namespace,
        component=component,
        sidecar_patch=SIDECAR_PATCH,
        token_seconds=token_seconds,
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


def read_log(workload: Workload) -> list[str]:
    """Return the lines of the first pod's sidecar."""
    pods = workload.pods()
    if not pods:
        return []
    return workload.kubectl("logs", pods[0]["metadata"]["name"], "--container=headroom", check=False).splitlines()
