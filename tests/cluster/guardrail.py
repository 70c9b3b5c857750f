"""Replicas that leak, with the guardrail of the shipped component on them."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.cluster.cluster import ROOT, SIDECAR_PATCH, Workload, kubectl

OVERLAY: Final = """\
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: {namespace}
resources:
- ../{base}
- budgets.yaml
components:
- {component}
configMapGenerator:
- {{name: evicting, files: [evicting.py]}}
patches:
{sidecar_patch}            command: [/opt/vllm-headroom/bin/python3, /opt/evicting/evicting.py]
            args: {arguments}
            env: {sidecar_settings}
            volumeMounts: [{{name: evicting, mountPath: /opt/evicting}}]
          containers:
          - name: vllm
            env: {engine_settings}
            startupProbe: {{periodSeconds: 5}}
          volumes:
          - {{name: evicting, configMap: {{name: evicting}}}}
          - name: headroom-api
            projected:
              sources:
              - serviceAccountToken: {{path: token, expirationSeconds: {token_seconds}}}
              - configMap: {{name: kube-root-ca.crt, items: [{{key: ca.crt, path: ca.crt}}]}}
              - downwardAPI: {{items: [{{path: namespace, fieldRef: {{fieldPath: metadata.namespace}}}}]}}
"""
"""A simulated leak in the sidecar, with the guardrail, RBAC, account and token as they are shipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The simulated engines of the sidecars, and what their pods' containers are set to."""

    speed: int
    sample_interval_seconds: int
    """Of the simulated time."""
    sidecar_settings: Mapping[str, str]
    engine_settings: Mapping[str, str]


FAST: Final = Simulation(
    speed=1000,
    sample_interval_seconds=120,
    sidecar_settings={"HEADROOM_EVICT": "on", "HEADROOM_EVICT_SECONDS": "86400"},
    engine_settings={"ENGINE_LOAD_SECONDS": "40"},
)
"""The demo's leak at 1,000 times real time; a replacement loads for longer than the pod before it takes to end."""

BUDGET: Final = """\
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: vllm}
spec:
  maxUnavailable: 1
  selector: {matchLabels: {app.kubernetes.io/name: vllm}}
"""
OTHER_BUDGET: Final = BUDGET.replace("name: vllm}\n", "name: of-others}\n", 1)


def render_settings(settings: Mapping[str, str]) -> str:
    """Return a container's environment as YAML."""
    return json.dumps([{"name": name, "value": value} for name, value in settings.items()])


def build_workload(
    folder: Path,
    name: str,
    replicas: int,
    *,
    token_seconds: int = 3600,
    budgets: Sequence[str] = (BUDGET,),
    simulation: Simulation = FAST,
) -> Workload:
    """Apply replicas that leak, with the guardrail; return their workload."""
    workload = Workload(f"headroom-{uuid.uuid4().hex[:4]}-{name}")
    workload.write_overlay(folder, replicas)
    place = folder / f"{name}-guarded"
    place.mkdir()
    account = {"ACCOUNT": "/var/run/secrets/kubernetes.io/serviceaccount"}
    interval = ["--sample-interval-seconds", str(simulation.sample_interval_seconds)]
    text = OVERLAY.format(
        namespace=workload.namespace,
        base=workload.namespace,
        component=os.path.relpath(ROOT / "deploy" / "kubernetes" / "components" / "evict", place),
        sidecar_patch=SIDECAR_PATCH,
        arguments=json.dumps(["demo", "--scenario", "leak", "--speed", str(simulation.speed), *interval]),
        sidecar_settings=render_settings(account | dict(simulation.sidecar_settings)),
        engine_settings=render_settings(simulation.engine_settings),
        token_seconds=token_seconds,
    )
    (place / "kustomization.yaml").write_text(text if budgets else text.replace("- budgets.yaml\n", ""))
    (place / "budgets.yaml").write_text("---\n".join(budgets))
    (place / "evicting.py").write_text((ROOT / "tests" / "e2e" / "evicting.py").read_text())
    kubectl("apply", "--server-side", "--kustomize", str(place))
    return workload


def list_ready(workload: Workload) -> set[str]:
    """Return the names of the pods that serve."""
    names = set()
    for pod in workload.pods():
        conditions = {condition["type"]: condition["status"] for condition in pod["status"].get("conditions", ())}
        if conditions.get("Ready") == "True":
            names.add(pod["metadata"]["name"])
    return names


def read_log(workload: Workload) -> list[str]:
    """Return the lines of the first pod's sidecar."""
    pods = workload.pods()
    if not pods:
        return []
    return workload.kubectl("logs", pods[0]["metadata"]["name"], "--container=headroom", check=False).splitlines()
