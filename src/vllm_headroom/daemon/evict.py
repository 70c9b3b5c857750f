"""Have the API server evict this pod before a leak ends its engine, one pod of a workload at a time."""

import json
import os
from contextlib import suppress
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import httpx

from vllm_headroom.clock import Clock
from vllm_headroom.config import Settings
from vllm_headroom.derive.gates import Guardrail
from vllm_headroom.log import Log
from vllm_headroom.model import Failure
from vllm_headroom.scrape.http.reader import PageReader
from vllm_headroom.vocabulary import EvictionResult

log = Log(__name__)

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TURN_SECONDS: Final = 10.0
"""From one look to the next, and between two renewals of the Lease."""

LEASE_SECONDS: Final = 120
"""A Lease not renewed for so long is free: longer than an evicted pod takes to be counted as missing (milliseconds) and
than a request to the API server may be under way."""

REQUEST_SECONDS: Final = 15.0
"""The API server itself tries an eviction for 10 s while others change the PodDisruptionBudget."""

LONGEST_REST_SECONDS: Final = 320.0
"""After refusals the pause doubles, from TURN_SECONDS to this."""

Object = dict[str, Any]


class NotNowError(Exception):
    """Why nothing is evicted now, in one line.

    `status` is that of a refusal; 0 without an answer, where what was asked may yet be done; None where nothing was
    refused.
    """

    def __init__(self, problem: str, status: int | None = None) -> None:
        super().__init__(problem)
        self.status = status


class Evictor:
    """Evicts the pod `name`, at most one of its workload at a time; as a dry run it only reads."""

    def __init__(
        self, api: PageReader, settings: Settings, *, namespace: str, name: str, clock: Clock
    ) -> None:
        self._api, self._settings, self._clock = api, settings, clock
        self._namespace, self._name = namespace, name
        self._requests = dict.fromkeys(EvictionResult, 0)
        self._pod: Object = {}
        self._lease: Object = {}
        self._lease_name = self._identity = ""
        self._leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._version: object = None
        self._held_until = self._rests_until = self._changed_at = 0.0
        self._has_asked = False
        self._refusals = 0
        self._problem = ""

    @property
    def guardrail(self) -> Guardrail:
        """The settings and the state, for what is derived and shown."""
        return Guardrail(
            near_seconds=self._settings.evict_seconds,
            quiet_hour=self._settings.evict_quiet_hour,
            is_holder=self._is_holder,
            requests=tuple(self._requests.items()),
        )

    async def close(self) -> None:
        """Close the connection; a Lease that is held expires."""
        await self._api.close()

    async def turn(self, due: str | None) -> None:
        """Take the next step; `due` is why this pod should be evicted now, None while it should not."""
        if self._clock.monotonic() < self._rests_until:
            return
        problem, is_refusal = "", False
        try:
            if due is not None or (self._has_asked and self._is_holder):
                await self._step(due or "")
            else:
                await self._give_up()
        except NotNowError as error:
            problem, is_refusal = str(error), error.status is not None
        except Exception as error:  # noqa: BLE001 - objects of another shape; the guardrail's fault costs nothing else
            problem, is_refusal = f"the API server's answer is not understood ({error!r})", True
        self._refusals = self._refusals + 1 if is_refusal else 0
        if is_refusal:
            rest_seconds = min(TURN_SECONDS * 2**self._refusals, LONGEST_REST_SECONDS)
            self._rests_until = self._clock.monotonic() + rest_seconds
        if problem and problem != self._problem:
            log.warning("eviction of this pod waits", problem=problem, why=due)
        self._problem = problem

    async def _step(self, due: str) -> None:
        """Evict the pod, or renew the Lease after that; raises NotNowError."""
        if self._has_asked and not self._is_holder:
            return
        self._pod = self._pod or await self._read_pod()
        began = self._clock.monotonic()
        lease = await self._read_lease()
        if self._has_asked:
            await self._take_lease(lease, began)
            return
        await self._check_budget()
        if self._settings.evict == "dry-run":
            self._finish(EvictionResult.DRY_RUN, "would ask for the eviction of this pod", due)
            return
        await self._take_lease(
            lease, began
        )  # nobody had it since it was read, so that the budget still holds
        try:
            await self._evict()
        except NotNowError as error:
            if error.status != 0:
                await self._release()
            raise
        self._finish(EvictionResult.ACCEPTED, "asked for the eviction of this pod", due)

    def _finish(self, result: EvictionResult, event: str, due: str) -> None:
        self._requests[result] += 1
        self._has_asked = True
        log.warning(event, pod=self._name, why=due)

    async def _give_up(self) -> None:
        self._has_asked = False
        if self._problem:
            log.info("eviction of this pod is not due any more")
        if self._is_holder:
            await self._release()

    async def _read_pod(self) -> Object:
        pod = await self._ask("GET", f"/api/v1/namespaces/{self._namespace}/pods/{self._name}")
        metadata = pod["metadata"]
        owner = next(
            (each for each in metadata.get("ownerReferences", ()) if each.get("controller")), None
        )
        if owner is None:
            raise NotNowError("no controller would replace this pod")
        kind, name, template = (
            owner["kind"],
            owner["name"],
            metadata.get("labels", {}).get("pod-template-hash"),
        )
        if (
            kind == "ReplicaSet" and template and name.endswith(f"-{template}")
        ):  # of a Deployment, whose name lasts
            kind, name = "Deployment", name.removesuffix(f"-{template}")
        self._lease_name, self._identity = (
            f"vllm-headroom-{kind.lower()}-{name}",
            f"{self._name}_{metadata['uid']}",
        )
        if not any("readinessProbe" in container for container in pod["spec"]["containers"]):
            raise NotNowError(
                "no container has a readinessProbe: when a replacement serves is not known"
            )
        return pod

    async def _check_budget(self) -> None:
        """Raise NotNowError unless one PodDisruptionBudget selects the pod and all pods that it expects are healthy."""
        path = f"/apis/policy/v1/namespaces/{self._namespace}/poddisruptionbudgets"
        labels = self._pod["metadata"].get("labels", {}).items()
        pairs = [
            (each, each["spec"].get("selector", {}))
            for each in (await self._ask("GET", path))["items"]
        ]
        found = [
            each
            for each, by in pairs
            if by.keys() == {"matchLabels"} and by["matchLabels"].items() <= labels
        ]
        if len(found) != 1:
            few = len(found) or "no"
            raise NotNowError(
                f"{few} PodDisruptionBudgets select this pod, by matchLabels alone: it needs one"
            )
        name, status = found[0]["metadata"]["name"], found[0].get("status", {})
        if isinstance(
            found[0]["spec"].get("minAvailable"), int
        ):  # the controller then expects only pods that exist
            raise NotNowError(
                f"PodDisruptionBudget {name} does not count missing pods: it needs maxUnavailable"
            )
        healthy, expected = status.get("currentHealthy", 0), status.get("expectedPods", 1)
        if healthy < expected or status.get("disruptedPods"):
            raise NotNowError(
                f"a pod restarts: {healthy} of {expected} are healthy by PodDisruptionBudget {name}"
            )

    async def _read_lease(self) -> Object:
        """Return the Lease if it is free or ours, empty where there is none; raises NotNowError while another has it.

        A Lease expires when it was seen unchanged for its duration; clocks of machines are not compared.
        """
        try:
            lease = await self._ask("GET", f"{self._leases}/{self._lease_name}")
        except NotNowError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            return {}
        if (version := lease["metadata"]["resourceVersion"]) != self._version:
            self._version, self._changed_at = version, self._clock.monotonic()
        spec = lease.get("spec", {})
        holder, seconds = (
            spec.get("holderIdentity"),
            spec.get("leaseDurationSeconds") or LEASE_SECONDS,
        )
        if (
            holder
            and holder != self._identity
            and self._clock.monotonic() <= self._changed_at + seconds
        ):
            raise NotNowError(f"{holder} holds Lease {self._lease_name}")
        return lease

    async def _take_lease(self, lease: Object, began: float) -> None:
        """Take the Lease or renew it, as it was read after `began`; raises NotNowError where another pod was faster."""
        before = lease.get("spec", {})
        now = datetime.fromtimestamp(self._clock.time(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": LEASE_SECONDS,
            "renewTime": now,
        }
        if before.get("holderIdentity") != self._identity:
            spec |= {
                "acquireTime": now,
                "leaseTransitions": before.get("leaseTransitions", 0) + bool(lease),
            }
        self._lease = await self._write_lease(lease, before | spec)
        self._held_until = began + LEASE_SECONDS

    async def _release(self) -> None:
        self._held_until = 0.0
        with suppress(NotNowError):  # it expires
            await self._write_lease(self._lease, self._lease["spec"] | {"holderIdentity": ""})

    async def _write_lease(self, lease: Object, spec: Object) -> Object:
        """Return the Lease as the API server has stored it, if nobody changed it since `lease` was read."""
        new = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._lease_name},
        }
        method, path = (
            ("PUT", f"{self._leases}/{self._lease_name}") if lease else ("POST", self._leases)
        )
        try:
            return await self._ask(method, path, {**(lease or new), "spec": spec})
        except NotNowError as error:
            if error.status == HTTPStatus.CONFLICT:
                raise NotNowError(
                    f"another pod was faster to take Lease {self._lease_name}"
                ) from None
            raise

    async def _evict(self) -> None:
        if self._clock.monotonic() > self._held_until - LEASE_SECONDS / 2:
            raise NotNowError(
                "the API server took too long: the Lease could expire before the eviction"
            )
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": self._name, "namespace": self._namespace},
            "deleteOptions": {"preconditions": {"uid": self._pod["metadata"]["uid"]}},
        }
        try:
            await self._ask(
                "POST", f"/api/v1/namespaces/{self._namespace}/pods/{self._name}/eviction", body
            )
        except NotNowError as error:
            is_budget = error.status == HTTPStatus.TOO_MANY_REQUESTS
            self._requests[EvictionResult.REFUSED if is_budget else EvictionResult.FAILED] += 1
            raise

    async def _ask(self, method: str, path: str, body: Object | None = None) -> Object:
        """Return the object that the API server answers with; raises NotNowError."""
        reply = await self._api.send(method, path, body)
        if isinstance(reply, Failure):
            raise NotNowError(f"the API server does not answer ({reply.reason})", 0)
        answer: Object = {"message": "no object of Kubernetes"}
        with suppress(ValueError):
            answer = json.loads(reply.text)
            is_failure = answer.get("status") == "Failure"  # which an answer of 201 may say too
            if reply.status < HTTPStatus.BAD_REQUEST and not is_failure:
                return answer
        is_refusal = HTTPStatus.BAD_REQUEST <= reply.status < HTTPStatus.INTERNAL_SERVER_ERROR
        problem = f"the API server answers {reply.status}: {str(answer.get('message'))[:300]}"
        raise NotNowError(problem, reply.status if is_refusal else 0)

    @property
    def _is_holder(self) -> bool:
        return self._clock.monotonic() < self._held_until


def build_evictor(settings: Settings, clock: Clock) -> Evictor | None:
    """Return the guardrail; None where it is off, and with a log line where it was asked for outside of a pod."""
    if settings.evict == "off":
        return None
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{each}", "") for each in ("HOST", "PORT"))
    name = os.environ.get("POD_NAME", "")
    try:
        namespace = (ACCOUNT / "namespace").read_text().strip()
    except OSError:
        namespace = ""
    if not (host and port.isdigit() and name and namespace):
        problem = f"no pod with POD_NAME and a service account in {ACCOUNT}, which the component evict provides"
        log.error("HEADROOM_EVICT stays off", problem=problem)
        return None
    reader = PageReader(
        url=str(httpx.URL(scheme="https", host=host, port=int(port))),
        timeout_seconds=REQUEST_SECONDS,
        bearer_token_file=ACCOUNT / "token",
        ca_file=ACCOUNT / "ca.crt",
        headers={"Accept": "application/json"},
    )
    return Evictor(reader, settings, namespace=namespace, name=name, clock=clock)
