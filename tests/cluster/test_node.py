"""One sidecar a node on a real cluster: it finds each engine, and mistakes none for another while pods come and go."""

from __future__ import annotations

import os
import random
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.cluster import (
    FOLDER,
    HOST_ADDRESS,
    IS_OWN_CLUSTER,
    NODE,
    ROOT,
    SIDECAR_IMAGE,
    START_SECONDS,
    Workload,
    find_containers,
    kill_containers,
    kubectl,
    read,
)
from tests.cluster.guardrail import BUDGET
from tests.cluster.watching import SETTLE_SECONDS, Watch
from tests.e2e.paging import KEYS
from tests.fakes.pagerduty import PagerDuty
from tests.process import NO_TLS, eventually

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not IS_OWN_CLUSTER, reason="the node's card is made of its pods' volumes"),
]

CHAOS_SECONDS: Final = float(os.environ.get("CHAOS_SECONDS", "180"))
KILL_SECONDS: Final = 20.0
"""The time from one killed pod to the next."""

SCRAPE_SECONDS: Final = 5.0
CRASH_LOAD_SECONDS: Final = 120.0
"""How long the start after a crash takes: long enough for a page, on a busy machine too."""

LEAK_SECONDS: Final = 780.0
"""How long the leak may take to be found: less than what it needs to fill the GPU."""

GPUS: Final = 24
"""More than there are pods, so that a GPU of a pod that is gone is not another's until its last samples have left."""

IDLE_BYTES: Final = 600 * 2**20
LEAK_BYTES_PER_SECOND: Final = 8 * 2**20
"""The 9 GiB beside the weights last for 19 minutes."""

LIMIT_BYTES: Final = 256 * 2**20
"""The memory limit of the container of each engine, which the kernel has in the node's cgroups."""

OVERLAY: Final = """\
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: {namespace}
resources:
- {recipe}
components:
- {cgroups}
- {evict}
images:
- {{name: ghcr.io/vllm-headroom/vllm-headroom, newName: {image[0]}, newTag: "{image[1]}"}}
patches:
- target: {{kind: Namespace}}
  patch: '[{{"op": "replace", "path": "/metadata/name", "value": "{namespace}"}}]'
- target: {{kind: DaemonSet}}
  patch: |-
    apiVersion: apps/v1
    kind: DaemonSet
    metadata: {{name: any}}
    spec:
      template:
        spec:
          containers:
          - name: headroom
            volumeMounts: [{{name: card, mountPath: /run/nvml, readOnly: true}}]
          volumes:
          - {{name: headroom-state, hostPath: {{path: {state}, type: DirectoryOrCreate}}}}
          - {{name: card, hostPath: {{path: {card}, type: DirectoryOrCreate}}}}
"""


COMPONENTS: Final = ROOT / "deploy" / "kubernetes" / "components"


class NodeCard:
    """What the driver of the node reports: its GPUs, each pod's engine on one of them, by the pids of the node."""

    def __init__(self, folder: Path, namespaces: tuple[str, ...]) -> None:
        self._folder = folder
        self.namespaces = namespaces
        self._pods: list[str] = [""] * GPUS
        """The UID of the pod on each GPU; an engine that is down keeps it."""
        self._unused: deque[int] = deque(range(GPUS))
        """The GPUs of no pod, the one that has been unused for longest first."""
        self.names: dict[str, str] = {}
        """The names of the pods by UID."""
        self.owners: dict[str, list[str]] = {f"GPU-{index}": [] for index in range(GPUS)}
        """The names of all pods that each GPU has had, by its UUID, in their order."""

    def update(self) -> None:
        """Write the file of the fake NVML once."""
        texts = {
            file.parents[3].name: file.read_text()
            for file in NODE.glob("kubelet/pods/*/volumes/kubernetes.io~empty-dir/nvml/nvml.txt")
        }
        if texts.keys() - self.names.keys():
            for namespace in self.namespaces:
                for pod in read("pods", "--namespace", namespace)["items"]:
                    self.names[pod["metadata"]["uid"]] = pod["metadata"]["name"]
        texts = {uid: text for uid, text in texts.items() if uid in self.names}
        for index, uid in enumerate(self._pods):
            if uid and uid not in texts:
                self._pods[index] = ""
                self._unused.append(index)
        for uid in sorted(texts.keys() - set(self._pods)):
            index = self._unused.popleft()
            self._pods[index] = uid
            self.owners[f"GPU-{index}"].append(self.names[uid])
        cores = find_cores(texts.keys())
        lines = ["driver 580.95.05"]
        for index, uid in enumerate(self._pods):
            gpu = f"GPU-{index}"
            pid, used_bytes = cores.get(uid), 0
            for line in texts.get(uid, "").splitlines():
                if line.startswith("process ") and pid is not None:
                    used_bytes = int(line.split()[2])
            lines += [f"gpu {gpu}", "name NVIDIA H100 80GB HBM3"]
            lines += [f"memory {80 * 2**30} {IDLE_BYTES + used_bytes} {IDLE_BYTES}", "utilization 60"]
            if used_bytes:
                lines.append(f"process {pid} {used_bytes}")
        (self._folder / "nvml.new").write_text("\n".join(lines) + "\n")
        (self._folder / "nvml.new").replace(self._folder / "nvml.txt")

    def list_current(self) -> set[tuple[str, str]]:
        """Return the pairs of a GPU and the pod that has it now."""
        return {(f"GPU-{index}", self.names[uid]) for index, uid in enumerate(self._pods) if uid}

    @contextmanager
    def run(self) -> Iterator[None]:
        """Keep the file up to date until the end."""
        has_ended = threading.Event()

        def follow() -> None:
            while not has_ended.wait(1.0):
                try:
                    self.update()
                except (OSError, AssertionError):  # a pod ended meanwhile
                    continue

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        try:
            yield
        finally:
            has_ended.set()
            follower.join()


def find_cores(uids: Any) -> dict[str, int]:
    """Return the pid of each pod's core on the node."""
    cores = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if not (folder / "cmdline").read_bytes().startswith(b"VLLM::EngineCore"):
                continue
            cgroup = (folder / "cgroup").read_text()
        except OSError:  # it ended meanwhile
            continue
        for uid in uids:
            if uid in cgroup:
                cores[uid] = int(folder.name)
    return cores


class Sidecar:
    """The DaemonSet, and what its page has shown."""

    def __init__(self, namespace: str, card: NodeCard) -> None:
        self.namespace = namespace
        self._card = card
        self.mistakes: set[str] = set()
        self.pages = 0
        self._address = ""

    def apply(self, folder: Path, card_folder: Path) -> None:
        place = folder / self.namespace
        place.mkdir()
        text = OVERLAY.format(
            namespace=self.namespace,
            recipe=os.path.relpath(ROOT / "deploy" / "kubernetes" / "recipes" / "daemonset", place),
            cgroups=os.path.relpath(COMPONENTS / "node-cgroups", place),
            evict=os.path.relpath(COMPONENTS / "node-evict", place),
            image=SIDECAR_IMAGE.rsplit(":", 1),
            state=FOLDER / "node-state",
            card=card_folder,
        )
        (place / "kustomization.yaml").write_text(text)
        kubectl("apply", "--server-side", "--kustomize", str(place))

    def find_pod(self) -> dict[str, Any]:
        """Return the pod of the DaemonSet on the node; empty while there is none."""
        pods = read("pods", "--namespace", self.namespace)["items"]
        return next((pod for pod in pods if "deletionTimestamp" not in pod["metadata"]), {})

    def restart(self) -> None:
        """Roll the DaemonSet out again, and wait until another pod is ready."""
        old_name = self.find_pod()["metadata"]["name"]
        kubectl("--namespace", self.namespace, "rollout", "restart", "daemonset")

        def is_replaced() -> bool:
            pod = self.find_pod()
            if not pod or pod["metadata"]["name"] == old_name:
                return False
            conditions = pod["status"].get("conditions", ())
            return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)

        eventually(is_replaced, "the DaemonSet has a new pod", START_SECONDS, 2.0)
        self._address = ""

    def allow_evictions(self, workload: Workload) -> None:
        """Let the sidecar ask for evictions in the namespace of a workload, as the component says."""
        workload.kubectl("apply", "--filename=-", input_text=BUDGET)
        account = f"--serviceaccount={self.namespace}:vllm-headroom"
        workload.kubectl("create", "rolebinding", "evict", "--clusterrole=vllm-headroom-evict", account)

    def fetch(self, path: str) -> str:
        """Return a page of the sidecar; empty while there is none."""
        if not self._address:
            self._address = self.find_pod().get("status", {}).get("podIP", "")
        try:
            answer = httpx.get(f"http://{self._address}:9839{path}", timeout=10, verify=NO_TLS)
        except (httpx.TransportError, httpx.InvalidURL):
            self._address = ""
            return ""
        return answer.text if answer.is_success else ""

    def read_states(self) -> dict[str, str]:
        """Return the state of each engine of these namespaces by pod."""
        states = {}
        for name, labels, value in self._list_samples(self.fetch("/metrics")):
            if name == "headroom_engine_state" and value == 1 and labels.get("namespace") in self._card.namespaces:
                states[labels["pod"]] = labels["state"]
        return states

    def enable_evictions(self) -> None:
        """Have it evict, and no longer only log that it would."""
        setting = ("--containers=headroom", "HEADROOM_EVICT=on")
        kubectl("--namespace", self.namespace, "set", "env", "daemonset/vllm-headroom", *setting)

    def has_logged(self, *words: str) -> bool:
        """Return whether a line of its log has all these words."""
        pod = self.find_pod()
        if not pod:
            return False
        name = pod["metadata"]["name"]
        log = kubectl("--namespace", self.namespace, "logs", name, "--container=headroom", check=False)
        return any(all(word in line for word in words) for line in log.splitlines())

    def read_values(self, metric: str, **wanted: str) -> dict[str, float]:
        """Return the values of a metric by pod, of these namespaces: the machine may have other engines."""
        page = eventually(lambda: self.fetch("/metrics"), "the sidecar has a page", START_SECONDS, 1.0)
        return {
            labels["pod"]: value
            for name, labels, value in self._list_samples(page)
            if name == metric and labels.get("namespace") in self._card.namespaces and wanted.items() <= labels.items()
        }

    def list_growing(self) -> set[str]:
        """Return the pods of the engines whose memory grows by the detector."""
        return {
            pod
            for state in ("growing", "leaking")
            for pod, value in self.read_values("headroom_leak_state", state=state).items()
            if value
        }

    def check_page(self) -> None:
        """Note every series that has the names of another engine than its own."""
        text = self.fetch("/metrics")
        self.pages += bool(text)
        for name, labels, _ in self._list_samples(text):
            pod = labels.get("pod", "")
            if labels.get("namespace") not in self._card.namespaces:
                pod = ""
            model = labels.get("model_name", pod)
            if pod and model != pod:
                self.mistakes.add(f"{name} of model {model} has pod {pod}")
            gpu = labels.get("uuid", "")
            if pod and gpu and pod not in self._card.owners[gpu]:
                self.mistakes.add(f"{name} of {gpu} has pod {pod}, whose it never was")

    def list_gpus(self) -> set[tuple[str, str]]:
        """Return the pairs of a GPU and a pod of these namespaces on the page."""
        return {
            (labels["uuid"], labels["pod"])
            for _, labels, _ in self._list_samples(self.fetch("/metrics"))
            if labels.get("namespace") in self._card.namespaces and labels.get("uuid")
        }

    @staticmethod
    def _list_samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                yield sample.name, sample.labels, sample.value


def cause_chaos(workloads: list[Workload], sidecar: Sidecar, ends_seconds: float) -> list[str]:
    """End pods at random in each of three ways; return what was done."""
    chance = random.Random(7)  # noqa: S311 - no secret
    report = []
    next_kill_seconds = time.monotonic()
    while time.monotonic() < ends_seconds:
        if time.monotonic() >= next_kill_seconds:
            next_kill_seconds += KILL_SECONDS
            workload = chance.choice(workloads)
            pods = workload.pods()
            if pods:
                name = chance.choice(pods)["metadata"]["name"]
                way = chance.choice(("delete", "delete at once", "kill"))
                report.append(f"{way} {name}")
                if way == "kill":
                    kill_containers(find_containers(workload.namespace, name, "vllm"))
                elif way == "delete":
                    workload.kubectl("delete", "pod", name, "--wait=false", check=False)
                else:
                    workload.kubectl("delete", "pod", name, "--wait=false", "--grace-period=0", "--force", check=False)
        sidecar.check_page()
        time.sleep(SCRAPE_SECONDS)
    return report


def wait_for_alerts(watch: Watch, alert: str, pod: str, own_pod: str) -> set[frozenset[tuple[str, str]]]:
    """Wait until this alert has fired on both engines, and all others of one on the other too; return them."""

    def list_common() -> set[frozenset[tuple[str, str]]]:
        alerts = watch.list_fired(pod)
        names = {dict(labels)["alertname"] for labels in alerts}
        return alerts if alert in names and alerts == watch.list_fired(own_pod) else set()

    return eventually(list_common, f"{alert} and the same others fire on {pod} and {own_pod}", START_SECONDS, 5.0)


def test_each_engine_of_the_node_is_followed_under_its_own_name(tmp_path: Path) -> None:
    run = uuid.uuid4().hex[:4]
    plain = [
        Workload(f"headroom-{run}-plain-{name}", has_sidecar=False, is_model_of_pod=True) for name in ("one", "two")
    ]
    own = Workload(f"headroom-{run}-own", is_model_of_pod=True)
    card_folder = FOLDER / "card"
    card_folder.mkdir(exist_ok=True)
    card = NodeCard(card_folder, tuple(workload.namespace for workload in plain))
    sidecar = Sidecar(f"headroom-{run}-node", card)
    pagerduty = PagerDuty(KEYS.values(), HOST_ADDRESS)
    watched = {workload.namespace for workload in (*plain, own)}
    watch = Watch(f"headroom-{run}-node-watch", watched | {sidecar.namespace})
    with ExitStack() as stack:
        stack.callback(pagerduty.close)
        for workload in (*plain, own):
            stack.callback(workload.delete)
            workload.apply(tmp_path, 2)
        stack.callback(kubectl, "delete", "namespace", sidecar.namespace, "--wait=false", check=False)
        stack.enter_context(card.run())
        sidecar.apply(tmp_path, card_folder)
        sidecar.allow_evictions(plain[1])
        stack.callback(watch.delete)
        watch.apply(tmp_path, pagerduty)
        eventually(lambda: all(workload.is_ready(2) for workload in (*plain, own)), "all serve", START_SECONDS, 2.0)

        def list_names() -> set[str]:
            return {pod["metadata"]["name"] for workload in plain for pod in workload.pods()}

        def all_serve() -> bool:
            names = list_names()
            states = sidecar.read_states()
            return len(names) == 4 and states == dict.fromkeys(names, "serving")

        eventually(all_serve, "the sidecar finds exactly the four without a sidecar", START_SECONDS, 2.0)
        limits_bytes = sidecar.read_values("headroom_host_memory_limit_bytes")
        assert {name: limits_bytes.get(name) for name in list_names()} == dict.fromkeys(list_names(), LIMIT_BYTES)
        own_names = {pod["metadata"]["name"] for pod in own.pods()}

        def names_own() -> bool:
            page = sidecar.fetch("/")
            return all(name in page for name in own_names)

        eventually(names_own, "those with their own sidecar are named", START_SECONDS, 2.0)
        eventually(lambda: watch.count_serving() == 6, "Prometheus sees all", START_SECONDS, 2.0)

        crashed = plain[0].pods()[0]["metadata"]["name"]
        leaking = plain[1].pods()[0]["metadata"]["name"]
        own_crashed, own_leaking = sorted(own_names)
        for workload, pod in ((plain[1], leaking), (own, own_leaking)):
            workload.order_pod(pod, f"leak {LEAK_BYTES_PER_SECOND}")
        time.sleep(SETTLE_SECONDS)
        for workload in (plain[0], own):
            workload.load_for(CRASH_LOAD_SECONDS)
        for workload, pod in ((plain[0], crashed), (own, own_crashed)):
            workload.order_pod(pod, "die")

        def has_exited() -> bool:
            return sidecar.read_values("headroom_engine_exits_total", reason="gone").get(crashed) == 1

        eventually(has_exited, "the exit is counted", START_SECONDS, 2.0)
        eventually(all_serve, "the crashed one serves again", START_SECONDS, 2.0)

        # State by the pod's UID: the DaemonSet's new pod knows the exit that it did not see.
        sidecar.restart()
        eventually(all_serve, "all are found again", START_SECONDS, 2.0)
        assert has_exited()

        eventually(lambda: leaking in sidecar.list_growing(), "the leak is found", LEAK_SECONDS, 5.0)
        assert sidecar.list_growing() == {leaking}

        def count_evictions() -> dict[str, float]:
            values = sidecar.read_values("headroom_eviction_requests_total", result="dry_run")
            return {pod: value for pod, value in values.items() if value}

        eventually(lambda: count_evictions() == {leaking: 1}, "it alone would be evicted", START_SECONDS, 2.0)

        for alert, pod, own_pod in (
            ("HeadroomModelDown", crashed, own_crashed),
            ("HeadroomOutOfMemorySoon", leaking, own_leaking),
        ):
            alerts = wait_for_alerts(watch, alert, pod, own_pod)
            print(f"{sorted(dict(labels)['alertname'] for labels in alerts)} with either sidecar")  # noqa: T201

        plain[0].restart()
        sidecar.enable_evictions()
        event = "asked for the eviction of this pod"
        eventually(lambda: sidecar.has_logged(event, leaking), "the leaking one is evicted", START_SECONDS, 2.0)
        eventually(lambda: leaking not in list_names() and all_serve(), "all that came serve", START_SECONDS, 2.0)
        report = cause_chaos(plain, sidecar, time.monotonic() + CHAOS_SECONDS)
        eventually(all_serve, "all serve after the chaos", START_SECONDS, 2.0)
        eventually(lambda: sidecar.list_gpus() == card.list_current(), "each has its own GPU", START_SECONDS, 2.0)

    print(f"{len(report)} pods killed, {sidecar.pages} pages: {'; '.join(report)}")  # noqa: T201 - the result
    assert sidecar.mistakes == set()
