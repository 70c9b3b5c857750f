"""A namespace of Kubernetes as its API server shows it: Leases, evictions and who replaces a pod.

What is refused, and with which words, follows the registries of pods and leases and the disruption controller.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

Object = dict[str, Any]
Answer = tuple[int, Object]

NAMESPACE: Final = "llm"
LABELS: Final = {"app": "vllm"}
HASH: Final = "5d9c7b9f4"
ROLE: Final = frozenset(
    {
        "get pods",
        "create pods/eviction",
        "list poddisruptionbudgets",
        "get leases",
        "create leases",
        "update leases",
    }
)
"""What the component's Role grants; a test compares them."""

PATH: Final = re.compile(
    r"/(?:api|apis/[a-z0-9.]+)/v1/namespaces/(?P<namespace>[^/]+)/(?P<resource>[a-z]+)(?:/(?P<name>[^/]+))?"
    r"(?:/(?P<sub>[a-z]+))?"
)
VERBS: Final = {"POST": "create", "PUT": "update", "DELETE": "delete"}
REASONS: Final = {403: "Forbidden", 404: "NotFound", 409: "Conflict", 422: "Invalid", 429: "TooManyRequests"}


def failure(code: int, message: str) -> Answer:
    """Return an answer that refuses."""
    head = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
    return code, {**head, "message": message, "reason": REASONS.get(code, "InternalError"), "code": code}


@dataclass(kw_only=True, slots=True)
class Pod:
    """A pod; it serves from `ready_at`, and is gone at `gone_at` where it is being deleted."""

    name: str
    uid: str
    ready_at: float
    gone_at: float = math.inf


@dataclass(kw_only=True)
class Cluster:
    """A workload of some replicas that load for `load_seconds` and are given `grace_seconds` to end.

    `lag_seconds` pass until the disruption controller counts again. `budgets` are the specs of PodDisruptionBudgets.
    """

    replicas: int
    load_seconds: float = 300.0
    grace_seconds: float = 60.0
    lag_seconds: float = 0.0
    is_stateful: bool = False
    verbs: frozenset[str] = ROLE
    budgets: tuple[Object, ...] = ({"selector": {"matchLabels": LABELS}, "maxUnavailable": 1},)
    has_controller: bool = True
    has_readiness: bool = True
    now: float = 0.0
    pods: dict[str, Pod] = field(default_factory=dict)
    leases: dict[str, Object] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    late: list[tuple[float, str, str, Object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._version = self._number = 0
        self._counted_at = -math.inf
        self._unreplaced = 0
        self._replacing: set[str] = set()
        self._budgets: list[Object] = [
            {
                "metadata": {"name": f"vllm-{number}", "namespace": NAMESPACE, "generation": 1},
                "spec": spec,
                "status": {},
            }
            for number, spec in enumerate(self.budgets)
        ]
        self._replace()
        for pod in self.pods.values():
            pod.ready_at = 0.0
        self._count()

    def advance(self, now: float) -> None:
        """Bring the namespace to this time: what kubelets and controllers do."""
        self.now = now
        due, self.late = (
            [late_step for late_step in self.late if late_step[0] <= now],
            [late_step for late_step in self.late if late_step[0] > now],
        )
        for _, method, path, body in due:
            self.request(method, path, body)
        for name in [pod.name for pod in self.pods.values() if pod.gone_at <= now]:
            del self.pods[name]
        self._replace()
        self._replacing -= {pod.uid for pod in self.pods.values() if self.is_ready(pod)}
        if now - self._counted_at >= self.lag_seconds:
            self._count()

    def crash(self, name: str) -> None:
        """End the engine of a pod: the kubelet starts the container again, which has to load."""
        self.pods[name].ready_at = self.now + self.load_seconds

    def is_ready(self, pod: Pod) -> bool:
        """Return whether a pod serves."""
        return pod.ready_at <= self.now and pod.gone_at == math.inf

    @property
    def ready(self) -> int:
        """How many pods serve."""
        return sum(map(self.is_ready, self.pods.values()))

    @property
    def voluntary(self) -> int:
        """How many evicted pods have no replacement that has served yet."""
        return self._unreplaced + len(self._replacing)

    def _replace(self) -> None:
        """Create what is missing: a Deployment once a pod is being deleted, a StatefulSet when its name is free."""
        staying = [pod for pod in self.pods.values() if pod.gone_at == math.inf or self.is_stateful]
        free = (name for name in (f"vllm-{number}" for number in range(self.replicas)) if name not in self.pods)
        for _ in range(self.replicas - len(staying)):
            self._number += 1
            name = next(free) if self.is_stateful else f"vllm-{HASH}-{self._number:05}"
            pod = Pod(name=name, uid=f"uid-{self._number}", ready_at=self.now + self.load_seconds)
            self.pods[name] = pod
            if self._unreplaced:
                self._unreplaced -= 1
                self._replacing.add(pod.uid)

    def _count(self) -> None:
        """Do what the disruption controller does."""
        self._counted_at = self.now
        for budget in self._budgets:
            spec, status = budget["spec"], budget["status"]
            disrupted = {name: at for name, at in status.get("disruptedPods", {}).items() if name in self.pods}
            disrupted = {name: at for name, at in disrupted.items() if self.pods[name].gone_at == math.inf}
            if isinstance(minimum := spec.get("minAvailable"), int):
                expected, desired = len(self.pods), minimum
            elif minimum is not None:
                expected, desired = self.replicas, math.ceil(self.replicas * int(minimum.rstrip("%")) / 100)
            else:
                expected, desired = self.replicas, max(0, self.replicas - spec["maxUnavailable"])
            budget["status"] = {
                "observedGeneration": budget["metadata"]["generation"],
                "currentHealthy": sum(self.is_ready(pod) and pod.name not in disrupted for pod in self.pods.values()),
                "desiredHealthy": desired,
                "expectedPods": expected,
                "disruptedPods": disrupted,
            }
            budget["status"]["disruptionsAllowed"] = max(0, budget["status"]["currentHealthy"] - desired)

    def request(self, method: str, path: str, body: Object | None) -> Answer:
        """Return what the API server answers."""
        match = PATH.fullmatch(path)
        if match is None or match["namespace"] != NAMESPACE:
            return failure(404, "the server could not find the requested resource")
        resource = "/".join(filter(None, (match["resource"], match["sub"])))
        verb = VERBS.get(method, "get" if match["name"] else "list")
        self.asked.append(f"{verb} {resource}")
        if self.asked[-1] not in self.verbs:
            user = f"system:serviceaccount:{NAMESPACE}:vllm-headroom"
            return failure(403, f'{resource} is forbidden: User "{user}" cannot {verb} resource "{resource}"')
        name, document = match["name"] or "", json.loads(json.dumps(body or {}))
        answers: dict[str, Callable[[], Answer]] = {
            "get pods": lambda: self._show_pod(name),
            "create pods/eviction": lambda: self._evict(name, document),
            "list poddisruptionbudgets": lambda: (200, {"items": copy.deepcopy(self._budgets)}),
            "get leases": lambda: self._find_lease(name),
            "create leases": lambda: self._create_lease(document),
            "update leases": lambda: self._update_lease(name, document),
        }
        return answers[self.asked[-1]]()

    def _show_pod(self, name: str) -> Answer:
        pod = self.pods.get(name)
        if pod is None:
            return failure(404, f'pods "{name}" not found')
        container = {"name": "vllm", "readinessProbe": {"httpGet": {"path": "/health"}}}
        owner = {"kind": "ReplicaSet", "name": f"vllm-{HASH}", "controller": True}
        if self.is_stateful:
            owner = {"kind": "StatefulSet", "name": "vllm", "controller": True}
        metadata: Object = {"name": name, "namespace": NAMESPACE, "uid": pod.uid, "labels": dict(LABELS)}
        if not self.is_stateful:
            metadata["labels"]["pod-template-hash"] = HASH
        metadata |= {"ownerReferences": [owner]} if self.has_controller else {}
        containers = [container if self.has_readiness else {"name": "vllm"}]
        return 200, {"kind": "Pod", "metadata": metadata, "spec": {"containers": containers}}

    def _evict(self, name: str, document: Object) -> Answer:
        if name not in self.pods:
            return failure(404, f'pods "{name}" not found')
        pod = self.pods[name]
        if (
            document["kind"] != "Eviction"
            or document["apiVersion"] != "policy/v1"
            or document["metadata"]["name"] != name
        ):
            return failure(400, "name in URL does not match name in Eviction object")
        options = document.get("deleteOptions", {})
        if options.get("preconditions", {}).get("uid", pod.uid) != pod.uid:
            return failure(409, f"Precondition failed: UID in precondition: {options}, UID in object meta: {pod.uid}")
        refusal = None if pod.gone_at < math.inf else self._disrupt(name)
        if refusal is not None:
            return refusal
        if pod.gone_at == math.inf:
            pod.gone_at = self.now + options.get("gracePeriodSeconds", self.grace_seconds)
            self._unreplaced += 1
        return 201, {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    def _disrupt(self, name: str) -> Answer | None:
        """Count the eviction where the PodDisruptionBudget allows it."""
        if len(self._budgets) > 1:  # a success of HTTP, as the registry makes it
            problem = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."
            return 201, failure(500, problem)[1]
        for budget in self._budgets:
            status = budget["status"]
            if status["observedGeneration"] < budget["metadata"]["generation"] or not status["disruptionsAllowed"]:
                return failure(429, "Cannot evict pod as it would violate the pod's disruption budget.")
            status["disruptionsAllowed"] -= 1
            status["disruptedPods"][name] = self.now
        return None

    def _find_lease(self, name: str) -> Answer:
        if name not in self.leases:
            return failure(404, f'leases.coordination.k8s.io "{name}" not found')
        return 200, copy.deepcopy(self.leases[name])

    def _create_lease(self, document: Object) -> Answer:
        name = document["metadata"]["name"]
        if name in self.leases:
            return failure(409, f'leases.coordination.k8s.io "{name}" already exists')
        return self._store_lease(document, 201)

    def _update_lease(self, name: str, document: Object) -> Answer:
        version = document["metadata"].get("resourceVersion")
        if version is None:
            return failure(422, "metadata.resourceVersion: Invalid value: must be specified for an update")
        if name not in self.leases or version != self.leases[name]["metadata"]["resourceVersion"]:
            return failure(409, f'Operation cannot be fulfilled on leases "{name}": the object has been modified')
        return self._store_lease(document, 200)

    def _store_lease(self, document: Object, status: int) -> Answer:
        spec = document["spec"]
        times = [spec[name] for name in ("acquireTime", "renewTime") if spec.get(name)]
        if not all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", time) for time in times):
            return failure(400, "a time is no MicroTime")
        if spec.get("leaseDurationSeconds", 1) <= 0 or spec.get("leaseTransitions", 0) < 0:
            return failure(422, "spec.leaseDurationSeconds: Invalid value: must be greater than 0")
        self._version += 1
        document["metadata"]["resourceVersion"] = str(self._version)
        self.leases[document["metadata"]["name"]] = document
        return status, copy.deepcopy(document)
