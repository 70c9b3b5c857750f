"""A namespace of a real cluster with the shipped example in it, and what a test does to its pods."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = Path(os.environ.get("CLUSTER_FOLDER", ".cluster")).resolve()
AWAY_SECONDS: Final = 20.0
"""How long the API server is away: longer than one try of the sidecar, 15 s."""

PATIENCE_SECONDS: Final = 90.0
"""How long a command waits for the API server: it is away on purpose, and then starts."""

REQUEST_SECONDS: Final = 60.0
"""How long one request that only reads may take before it is sent again."""

READ_SECONDS: Final = 900.0
"""How long all tries of a request that only reads may take: on a busy machine the API server answers late."""

START_SECONDS: Final = 1800.0
"""How long anything may take to start on a busy machine: this only ends a test that failed."""

SIDECAR_IMAGE: Final = os.environ.get("SIDECAR_IMAGE", "localhost/vllm-headroom:image-test")
NEXT_SIDECAR_IMAGE: Final = os.environ.get("NEXT_SIDECAR_IMAGE", "localhost/vllm-headroom:next")
"""The image to which a sidecar is upgraded: another name is enough."""

ENGINE_IMAGE: Final = os.environ.get("ENGINE_IMAGE", "localhost/vllm-stand-in:1")
NODE: Final = FOLDER / "node"
IS_OWN_CLUSTER: Final = NODE.exists()
"""Whether node/start.sh started it: then its parts may be stopped."""

HOST_ADDRESS: Final = os.environ.get("HOST_ADDRESS", "10.200.7.1")
"""The address at which pods find what a test serves, by default that of the node of node/start.sh."""

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
          containers:
          - name: vllm
            env:
            - {{name: POD_NAME, valueFrom: {{fieldRef: {{fieldPath: metadata.name}}}}}}
            - {{name: ENGINE_LOAD_SECONDS, value: "{load_seconds}"}}
            args: [{model}, --host=0.0.0.0, --port=8000, --gpu-memory-utilization=0.90]
            startupProbe: {{periodSeconds: 1, failureThreshold: 600}}
            resources:
              requests: {{cpu: 1m, memory: 32Mi}}
              limits: {{memory: 256Mi, nvidia.com/gpu: 1}}
            volumeMounts: [{{name: nvml, mountPath: /run/nvml}}]
          volumes:
          - {{name: nvml, emptyDir: {{sizeLimit: 64Mi}}}}
          - {{name: models, emptyDir: {{}}, persistentVolumeClaim: null}}
"""
"""What this machine has no room for is taken out of the example, and its volume, which needs a disk of 100 GiB."""

SIDECAR_PATCH: Final = """\
- target: {kind: Deployment, name: vllm}
  patch: |-
    apiVersion: apps/v1
    kind: Deployment
    metadata: {name: vllm}
    spec:
      template:
        spec:
          initContainers:
          - name: headroom
"""
"""How a patch of the sidecar begins; what follows are fields of its container, then of its pod."""

SIDECAR: Final = (
    SIDECAR_PATCH
    + """\
            volumeMounts: [{name: nvml, mountPath: /run/nvml, readOnly: true}]
"""
)
WEB_CONFIG: Final = (
    SIDECAR_PATCH
    + """\
            env: [{name: HEADROOM_WEB_CONFIG_FILE, value: /etc/vllm-headroom/web.config.yml}]
            volumeMounts: [{name: web-config, mountPath: /etc/vllm-headroom, readOnly: true}]
          volumes:
          - {name: web-config, secret: {secretName: web-config}}
"""
)
GOOD_WEB_CONFIG: Final = "http_server_config: {headers: {X-Frame-Options: deny}}"
SPOILED_WEB_CONFIG: Final = "tls_server_config: {cert_file: none.crt"

VOLUME_BYTES: Final = 64 * 2**20
"""The size limit of the volume in which the card's file is, as in `OVERLAY`."""

HOST_BYTES: Final = 200 * 2**20
"""Less than the limit of the engine's container, and more than a pod needs."""

SIGNAL_SIDECAR: Final = """\
import os, pathlib, sys
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    is_other = int(folder.name) != os.getpid()  # this script has the name in its own command line
    if is_other and b"vllm-headroom" in (folder / "cmdline").read_bytes():
        os.kill(int(folder.name), int(sys.argv[1]))
"""


def kubectl(*words: str, input_text: str = "", check: bool = True) -> str:
    """Return what kubectl prints; fail where it does, unless `check` is False; wait for an API server that is away.

    What applies objects is also tried again where the API server was too slow.
    """
    deadline_seconds = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            done = subprocess.run(
                [FOLDER / "kubectl", *words], input=input_text, capture_output=True, text=True, check=False, timeout=300
            )
        except subprocess.TimeoutExpired:
            if check:
                raise
            return ""
        is_away = "refused" in done.stderr or ("apply" in words and "imeout" in done.stderr)
        if done.returncode == 0 or not is_away or time.monotonic() > deadline_seconds:
            break
        time.sleep(1.0)
    assert not check or done.returncode == 0, f"kubectl {' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def read(*words: str) -> dict[str, Any]:
    """Return an object, or a list of them, as the API has it; ask again while the API server does not answer."""
    command = (str(FOLDER / "kubectl"), "get", *words, "--output=json", f"--request-timeout={REQUEST_SECONDS:g}s")
    deadline_seconds = time.monotonic() + READ_SECONDS
    while True:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=2 * REQUEST_SECONDS)
        except subprocess.TimeoutExpired as error:
            problem = str(error)
        else:
            if done.returncode == 0:
                answer: dict[str, Any] = json.loads(done.stdout)
                return answer
            problem = done.stderr
            # The API server answered: it will not answer otherwise.
            is_refused = "Error from server" in problem and "imeout" not in problem
            assert not is_refused, f"kubectl get {' '.join(words)}\n{problem}"
        assert time.monotonic() < deadline_seconds, f"kubectl get {' '.join(words)}\n{problem}"
        time.sleep(1.0)


@dataclass(frozen=True, slots=True)
class Workload:
    """The Deployment `vllm` of the shipped example in a namespace; the methods are the steps of a situation."""

    namespace: str
    has_sidecar: bool = True
    load_seconds: int = 5
    """How long the start of each new pod's engine takes."""
    has_web_config: bool = False
    """Whether the sidecar has a web.config.yml, from a Secret."""
    is_model_of_pod: bool = False
    """Whether the model of each pod has the name of the pod, to know them apart."""

    @property
    def model(self) -> str:
        return "$(POD_NAME)" if self.is_model_of_pod else f"{self.namespace}-model"

    def kubectl(self, *words: str, input_text: str = "", check: bool = True) -> str:
        return kubectl("--namespace", self.namespace, *words, input_text=input_text, check=check)

    def write_overlay(self, folder: Path, replicas: int) -> Path:
        """Write a folder for Kustomize with the example and the stand-in; return the folder."""
        place = folder / self.namespace
        place.mkdir()
        example = ROOT / "deploy" / "kubernetes" / "example"
        text = OVERLAY.format(
            namespace=self.namespace,
            replicas=replicas,
            model=self.model,
            load_seconds=self.load_seconds,
            example=os.path.relpath(example if self.has_sidecar else example / "vllm", place),
            engine=ENGINE_IMAGE.rsplit(":", 1),
            sidecar=SIDECAR_IMAGE.rsplit(":", 1),
        )
        if self.has_sidecar:
            text += SIDECAR
        if self.has_web_config:
            text += WEB_CONFIG
        (place / "kustomization.yaml").write_text(text)
        return place

    def apply(self, folder: Path, replicas: int) -> str:
        """Apply the example with the stand-in; return what kubectl reports."""
        report = kubectl("apply", "--server-side", "--kustomize", str(self.write_overlay(folder, replicas)))
        if self.has_web_config:
            self._write_web_config(GOOD_WEB_CONFIG)
        return report

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

    def order_pod(self, pod: str, *orders: str) -> None:
        """Have the engine of this pod do something now."""
        command = ("sh", "-c", "printf '%s\\n' \"$@\" >> /run/nvml/orders", "sh", *orders)
        self.kubectl("exec", pod, "--container=vllm", "--", *command)

    def order_each_start(self, *orders: str) -> None:
        """Have every later start of that engine do something, once it serves."""
        self._append("next", *orders)

    def load_for(self, seconds: float) -> None:
        """Have every later start of that engine take this long."""
        self._append("load_seconds", str(seconds))

    def fail_starts(self) -> None:
        """Have every later start of that engine end with status 1 when it has loaded."""
        self._append("fail", "")

    def roll_out_failing(self) -> None:
        """Roll out engines of which each start fails."""
        self.kubectl("set", "env", "deployment/vllm", "--containers=vllm", "ENGINE_FAILS=1")

    def fill_disk(self) -> None:
        """Write more into a volume of the first pod than the kubelet lets it have."""
        self.exec("vllm", "sh", "-c", f"head -c {2 * VOLUME_BYTES} /dev/zero > /run/nvml/fill")

    def fill_host(self) -> None:
        """Let the kernel have no more memory for the first pod than this, below the limits of its containers."""
        uid = self.pods()[0]["metadata"]["uid"]
        cluster = (NODE / "name").read_text().strip()
        # Control groups v1, and v2.
        for limit in (f"memory/{cluster}/*/*/pod{uid}/memory.limit_in_bytes", f"{cluster}/*/*/pod{uid}/memory.max"):
            for file in Path("/sys/fs/cgroup").glob(limit):
                file.write_text(str(HOST_BYTES))

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

    def upgrade_sidecar(self) -> None:
        """Change the sidecar's image in the first pod, under the running engine."""
        self.kubectl("set", "image", f"pod/{self.pods()[0]['metadata']['name']}", f"headroom={NEXT_SIDECAR_IMAGE}")

    def autoscale(self, replicas: int) -> None:
        """Have a HorizontalPodAutoscaler keep at least so many; it needs no metrics for that."""
        self.kubectl("autoscale", "deployment/vllm", f"--min={replicas}", f"--max={replicas + 1}", "--cpu=80%")

    def evict(self) -> None:
        """Ask the API server to evict the first pod, as a drain does."""
        name = self.pods()[0]["metadata"]["name"]
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": self.namespace}}
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}/eviction"
        kubectl("create", "--raw", path, "--filename=-", input_text=json.dumps(body))

    def drain(self) -> None:
        """Drain the node of the first pod, of these pods alone; then let pods onto it again."""
        node = self.pods()[0]["spec"]["nodeName"]
        self.kubectl("label", "pods", "--all", f"drained-by={self.namespace}")
        chosen = f"--pod-selector=drained-by={self.namespace}"
        try:
            kubectl("drain", node, chosen, "--delete-emptydir-data", "--timeout=240s")
        finally:
            kubectl("uncordon", node)

    def take_label_away(self) -> None:
        """Roll out pods without the label by which the PodMonitor selects them."""
        change = [{"op": "remove", "path": "/spec/template/metadata/labels/vllm-headroom"}]
        self.kubectl("patch", "deployment/vllm", "--type=json", f"--patch={json.dumps(change)}")

    def spoil_web_config(self) -> None:
        """Write a web.config.yml that cannot be read; the kubelet has it in the pods within two minutes."""
        self._write_web_config(SPOILED_WEB_CONFIG)

    def _write_web_config(self, text: str) -> None:
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "web-config", "namespace": self.namespace},
            "stringData": {"web.config.yml": text},
        }
        kubectl("apply", "--filename=-", input_text=json.dumps(secret))

    def restart_api_server(self) -> None:
        """Kill the API server, and start it again later."""
        end_part("kube-apiserver")
        time.sleep(AWAY_SECONDS)
        # It outlives the test: node/stop.sh ends it.
        subprocess.run(["sh", "-c", '"$0" &', str(NODE / "run-kube-apiserver")], check=True)

    def lose_node(self) -> None:
        """End the kubelet, then these pods' containers at once, as when a machine is switched off."""
        end_part("kubelet")
        kill_containers(find_containers(self.namespace))

    def delete(self) -> None:
        kubectl("delete", "namespace", self.namespace, "--wait=false", check=False)


def end_part(name: str) -> None:
    """Kill a part of the cluster that node/start.sh started."""
    os.kill(int((NODE / f"{name}.pid").read_text()), signal.SIGKILL)


def find_containers(namespace: str, pod: str = "", name: str = "") -> list[str]:
    """Return the containers of a namespace, or of a pod, or with that name there, of our cluster."""
    wanted = {
        "io.kubernetes.pod.namespace": namespace,
        "io.kubernetes.pod.name": pod,
        "io.kubernetes.container.name": name,
    }
    labels = ",".join(f'labels."{label}"=={value}' for label, value in wanted.items() if value)
    return run_ctr("containers", "list", "--quiet", labels).split()


def kill_containers(containers: list[str]) -> None:
    """Kill them at once; one of an earlier start has no task any more."""
    for container in containers:
        run_ctr("tasks", "kill", "--signal", "SIGKILL", container)


def run_ctr(*words: str) -> str:
    command = ("ctr", "--address", str(NODE / "containerd.sock"), "--namespace", "k8s.io", *words)
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
