"""A namespace of a real cluster with the shipped example in it, and what a test does to its pods."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = Path(os.environ.get("CLUSTER_FOLDER", ".cluster")).resolve()
SIDECAR_IMAGE: Final = os.environ.get("SIDECAR_IMAGE", "localhost/vllm-headroom:image-test")
ENGINE_IMAGE: Final = os.environ.get("ENGINE_IMAGE", "localhost/vllm-stand-in:1")

OVERLAY: Final = """\
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: {namespace}
resources:
- {example}
images:
- {{name: vllm/vllm-openai, newName: {engine[0]}, newTag: "{engine[1]}"}}
- {{name: ghcr.io/vllm-headroom/vllm-headroom, newName: {sidecar[0]}, newTag: "{sidecar[1]}"}}
replicas:
- {{name: vllm, count: {replicas}}}
patches:
- target: {{kind: Namespace}}
  patch: '[{{"op": "replace", "path": "/metadata/name", "value": "{namespace}"}}]'
- target: {{kind: PersistentVolumeClaim}}
  patch: |-
    apiVersion: v1
    kind: PersistentVolumeClaim
    metadata: {{name: vllm-models}}
    $patch: delete
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
            volumeMounts: [{{name: nvml, mountPath: /run/nvml, readOnly: true}}]
          containers:
          - name: vllm
            args: [{namespace}-model, --host=0.0.0.0, --port=8000, --gpu-memory-utilization=0.90]
            startupProbe: {{periodSeconds: 1}}
            resources:
              requests: {{cpu: 1m, memory: 32Mi}}
              limits: {{memory: 256Mi, nvidia.com/gpu: 1}}
            volumeMounts: [{{name: nvml, mountPath: /run/nvml}}]
          volumes:
          - {{name: nvml, emptyDir: {{}}}}
          - {{name: models, emptyDir: {{}}, persistentVolumeClaim: null}}
"""
"""What this machine has no room for is taken out of the example, and its volume, which needs a disk of 100 GiB."""

SIGNAL_SIDECAR: Final = """\
import os, pathlib, sys
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    is_other = int(folder.name) != os.getpid()  # this script has the name in its own command line
    if is_other and b"vllm-headroom" in (folder / "cmdline").read_bytes():
        os.kill(int(folder.name), int(sys.argv[1]))
"""


def kubectl(*words: str, given: str = "", check: bool = True) -> str:
    """Return what kubectl prints; fail where it does, unless `check` is False."""
    done = subprocess.run(
        [FOLDER / "kubectl", *words], input=given, capture_output=True, text=True, check=False, timeout=300
    )
    assert not check or done.returncode == 0, f"kubectl {' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def read(*words: str) -> dict[str, Any]:
    """Return an object, or a list of them, as the API has it."""
    found: dict[str, Any] = json.loads(kubectl("get", *words, "--output=json"))
    return found


@dataclass(frozen=True, slots=True)
class Workload:
    """The Deployment `vllm` of the shipped example in a namespace; the methods are the steps of a situation."""

    namespace: str

    def kubectl(self, *words: str, given: str = "", check: bool = True) -> str:
        return kubectl("--namespace", self.namespace, *words, given=given, check=check)

    def write_overlay(self, folder: Path, replicas: int) -> Path:
        """Write a folder for Kustomize with the example and the stand-in; return the folder."""
        place = folder / self.namespace
        place.mkdir()
        text = OVERLAY.format(
            namespace=self.namespace,
            replicas=replicas,
            example=os.path.relpath(ROOT / "deploy" / "kubernetes" / "example", place),
            engine=ENGINE_IMAGE.rsplit(":", 1),
            sidecar=SIDECAR_IMAGE.rsplit(":", 1),
        )
        (place / "kustomization.yaml").write_text(text)
        return place

    def apply(self, folder: Path, replicas: int) -> str:
        """Apply the example with the stand-in; return what kubectl reports."""
        return kubectl("apply", "--server-side", "--kustomize", str(self.write_overlay(folder, replicas)))

    def pods(self) -> list[dict[str, Any]]:
        """Return the pods that are not being deleted, in the order of their names."""
        pods = read("pods", "--namespace", self.namespace)["items"]
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def exec(self, container: str, *words: str) -> str:
        """Return what a command prints in the first pod."""
        name = self.pods()[0]["metadata"]["name"]
        return self.kubectl("exec", name, "--container", container, "--", *words)

    def is_ready(self, replicas: int) -> bool:
        status = read("deployment/vllm", "--namespace", self.namespace)["status"]
        return bool(status.get("readyReplicas", 0) == replicas == status.get("updatedReplicas", 0))

    def order(self, *orders: str) -> None:
        """Have the engine of the first pod do something now."""
        self._append("orders", *orders)

    def order_each_start(self, *orders: str) -> None:
        """Have every later start of that engine do something, once it serves."""
        self._append("next", *orders)

    def load_for(self, seconds: float) -> None:
        """Have every later start of that engine take this long."""
        self._append("load_seconds", str(seconds))

    def _append(self, file: str, *lines: str) -> None:
        self.exec("vllm", "sh", "-c", f"printf '%s\\n' \"$@\" >> /run/nvml/{file}", "sh", *lines)

    def signal_sidecar(self, number: int) -> None:
        """Send a signal to the sidecar of the first pod."""
        self.exec("vllm", "python3", "-c", SIGNAL_SIDECAR, str(number))

    def scale(self, replicas: int) -> None:
        self.kubectl("scale", "deployment/vllm", f"--replicas={replicas}")

    def restart(self) -> None:
        """Roll the workload out again."""
        self.kubectl("rollout", "restart", "deployment/vllm")

    def set_image(self, image: str) -> None:
        self.kubectl("set", "image", "deployment/vllm", f"vllm={image}")

    def evict(self) -> None:
        """Ask the API server to evict the first pod, as a drain does."""
        name = self.pods()[0]["metadata"]["name"]
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": self.namespace}}
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}/eviction"
        kubectl("create", "--raw", path, "--filename=-", given=json.dumps(body))

    def delete(self) -> None:
        kubectl("delete", "namespace", self.namespace, "--wait=false", check=False)


def list_targets(namespaces: set[str]) -> list[dict[str, Any]]:
    """Return what the PodMonitor's discovery finds, for Prometheus's discovery by files, through the API server."""
    targets = []
    for pod in read("pods", "--all-namespaces", "--selector=vllm-headroom=enabled")["items"]:
        namespace = pod["metadata"]["namespace"]
        name = pod["metadata"]["name"]
        address = pod["status"].get("podIP")
        # The operator drops pods that have ended.
        if namespace not in namespaces or address is None or pod["status"]["phase"] in {"Succeeded", "Failed"}:
            continue
        labels = {
            "namespace": namespace,
            "pod": name,
            "container": "headroom",
            "job": f"{namespace}/vllm-headroom",
            "instance": f"{address}:9839",
            "__metrics_path__": f"/api/v1/namespaces/{namespace}/pods/{name}:9839/proxy/metrics",
        }
        targets.append({"targets": ["PROXY"], "labels": labels})
    return targets


@contextmanager
def proxy(port: int) -> Iterator[str]:
    """Run `kubectl proxy`, by which Prometheus reaches the pods of any cluster; yield its address."""
    process = subprocess.Popen([FOLDER / "kubectl", "proxy", f"--port={port}"], stdout=subprocess.DEVNULL)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)
