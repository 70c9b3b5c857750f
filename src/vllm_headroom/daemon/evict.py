"""Evict a pod through the API server before a leak brings down its engine.

Only one pod of a workload is evicted at a time.
"""

import asyncio
import json
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final

from msgspec import Struct

from vllm_headroom.clock import Clock
from vllm_headroom.daemon.pod_api import ACCOUNT, open_api, open_pod_api
from vllm_headroom.derive.gates import Guardrail
from vllm_headroom.log import Log
from vllm_headroom.model import EnginePod, Failure
from vllm_headroom.scrape.http.failures import strip_advice
from vllm_headroom.scrape.http.reader import PageReader
from vllm_headroom.units import to_datetime
from vllm_headroom.vocabulary import EvictionResult

log = Log(__name__)

TURN_SECONDS: Final = 10.0
"""The interval at which the evictor takes a turn and renews the Lease."""

LEASE_SECONDS: Final = 120
"""How long a Lease stays valid without renewal. This time is longer than a request may take. It is
also much longer than the milliseconds that the API server needs to count an evicted pod.
"""

EVICTION_REQUEST_SECONDS: Final = 15.0
"""The time limit for a request. While the PodDisruptionBudget is changing, the API server retries
for up to 10 s.
"""

LONGEST_PAUSE_SECONDS: Final = 320.0
"""The longest pause after refusals. The pause starts at TURN_SECONDS and doubles with each refusal.
"""

SHOWN_CHARACTERS: Final = 300
"""The maximum number of characters that are logged from an API server message."""

GIVE_BACK_SECONDS: Final = 2.0
"""The time limit for giving the Lease back at shutdown, which takes three requests. An evicted
pod's sidecar ends after its engine, within the pod's grace period.
"""

STAYS_OFF: Final = "HEADROOM_EVICT stays off"

Object = dict[str, Any]
"""A Kubernetes object as JSON."""


class NotNowError(Exception):
    """Nothing can be evicted now; the message gives the reason in one line."""

    def __init__(self, problem: str, status: int | None = None) -> None:
        super().__init__(problem)
        self.status = status
        """The HTTP status of a refusal, or None if this pod only has to wait. The status is 0 if
        there was no clear response. In that case, the API server may still carry out the request.
        """


class EvictionPolicy(Struct, frozen=True, kw_only=True):
    """When a pod is evicted, according to the operator's settings."""

    is_dry_run: bool
    """Whether the evictor only reads from the API server and logs what it would do."""
    near_seconds: float
    """The pod is evicted if its memory runs out in less than this time."""
    quiet_hour: int | None
    """The hour of the day (UTC) in which any leak suffices for eviction. None if there is no such
    hour.
    """


class Evictor:
    """Evicts the pod `name`.

    Only one pod of its workload is evicted at a time. In a dry run, the evictor only reads.
    """

    def __init__(
        self,
        api: PageReader,
        policy: EvictionPolicy,
        *,
        namespace: str,
        name: str,
        uid: str = "",
        clock: Clock,
    ) -> None:
        """`uid` is the pod's UID, or "" for this process's own pod, whose name is enough."""
        self._api = api
        self._policy = policy
        self._clock = clock
        self._namespace = namespace
        self._name = name
        self._uid = uid
        self._requests = dict.fromkeys(EvictionResult, 0)
        self._pod: Object = {}
        """This pod's Kubernetes object, which is empty until it has been read."""
        self._identity = ""
        """The name under which this pod holds the Lease."""
        self._leases_path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._lease_name = ""
        self._lease: Object = {}
        """The Lease as last written by this pod. Empty if this pod has not written it."""
        self._lease_version: object = None
        """The Lease's resourceVersion when it was last read."""
        self._lease_changed_at = 0.0
        """When the current version of the Lease was first read, on the monotonic clock."""
        self._lease_held_until = 0.0
        """When this pod's hold on the Lease ends, on the monotonic clock. The value is 0 if the
        pod does not hold the Lease.
        """
        self._paused_until = 0.0
        self._has_evicted = False
        """Whether this pod was evicted or, in a dry run, would have been. The value is reset when
        the eviction is no longer due.
        """
        self._refusals = 0
        """The number of consecutive refusals."""
        self._problem = ""
        """Why the last turn could not evict the pod, or "" for no problem."""

    def read_guardrail(self) -> Guardrail:
        """Return the settings and state, for derivations and display."""
        return Guardrail(
            near_seconds=self._policy.near_seconds,
            quiet_hour=self._policy.quiet_hour,
            is_holder=self._is_holder,
            requests=tuple(self._requests.items()),
        )

    async def close(self) -> None:
        """Close the connection.

        A Lease that this pod holds is left to expire.
        """
        await self._api.close()

    async def give_lease_back(self) -> None:
        """Give the Lease to the next pod at shutdown, if that is safe.

        A Lease that is not given back expires. Giving it back is safe once the
        PodDisruptionBudget's status counts this pod as missing, because the next pod will wait for
        the replacement. Giving the Lease back takes at most GIVE_BACK_SECONDS.
        """
        if not (self._has_evicted and self._is_holder):
            return
        with suppress(NotNowError, TimeoutError):
            async with asyncio.timeout(GIVE_BACK_SECONDS):
                if not _counts_missing_pods(await self._find_budget()):
                    return
                # The Lease is read again. The shutdown may have cancelled a turn that had renewed
                # it.
                lease = await self._read_lease()
                if lease.get("spec", {}).get("holderIdentity") == self._identity:
                    self._lease = lease
                    is_released = await self._release()
                    if is_released:
                        log.info("Lease given back to the next pod", lease=self._lease_name)

    async def turn(self, due: str | None) -> None:
        """Try to evict this pod, or renew or release its Lease.

        Problems are logged, not raised. `due` is the reason to evict this pod now, or None. During
        the pause after a refusal, this method does nothing.
        """
        if self._clock.monotonic() < self._paused_until:
            return
        problem = ""
        is_refusal = False
        try:
            if due is not None or (self._has_evicted and self._is_holder):
                await self._step(due or "")
            else:
                await self._give_up()
        except NotNowError as error:
            problem = str(error)
            is_refusal = error.status is not None
        except Exception as error:  # noqa: BLE001 - objects of another shape must not end the daemon
            problem = f"the API server's answer is not understood ({error!r})"
            is_refusal = True
        # Waiting for another pod or for the budget is not a refusal. The next turn may succeed.
        if is_refusal:
            self._refusals += 1
            # The pauses get longer, because the whole cluster shares the API server.
            pause_seconds = min(TURN_SECONDS * 2**self._refusals, LONGEST_PAUSE_SECONDS)
            self._paused_until = self._clock.monotonic() + pause_seconds
        else:
            self._refusals = 0
        if problem and problem != self._problem:  # Each problem is logged once.
            log.warning("eviction of this pod waits", problem=problem, why=due)
        self._problem = problem

    async def _step(self, due: str) -> None:
        """Evict the pod, or renew the Lease if the pod has already been evicted.

        Raises NotNowError if the eviction is not allowed now, or if a request fails.
        """
        if self._has_evicted and not self._is_holder:
            return  # The Lease has expired, so another pod may hold it.
        if not self._pod:
            self._pod = await self._read_pod()
        began_seconds = self._clock.monotonic()
        lease = await self._read_lease()
        if self._has_evicted:
            await self._take_lease(lease, began_seconds)
            return
        # A dry run also checks the budget, to show what would prevent the eviction.
        await self._check_budget()
        if self._policy.is_dry_run:
            self._finish(EvictionResult.DRY_RUN, "would ask for the eviction of this pod", due)
            return
        # The Lease is taken only if nobody else has taken it since it was read. Therefore, no other
        # pod of the workload has been evicted since the budget was checked.
        await self._take_lease(lease, began_seconds)
        try:
            await self._evict()
        except NotNowError as error:
            # Without a response, the eviction may be under way. The Lease therefore keeps other
            # pods waiting.
            if error.status != 0:
                await self._release()
            raise
        self._finish(EvictionResult.ACCEPTED, "asked for the eviction of this pod", due)

    def _finish(self, result: EvictionResult, event: str, due: str) -> None:
        """Count and log the eviction or dry run."""
        self._requests[result] += 1
        self._has_evicted = True
        log.warning(event, pod=self._name, why=due)

    async def _give_up(self) -> None:
        """Release the Lease, because no eviction is due."""
        self._has_evicted = False
        if self._problem:
            log.info("eviction of this pod is not due any more")
        if self._is_holder:
            await self._release()

    async def _read_pod(self) -> Object:
        """Return this pod's object, and set the names of the Lease and of its holder.

        Raises NotNowError if no controller would replace the pod. Also raises it if the pod has no
        readinessProbe. Without the probe, nothing shows when a replacement is serving.
        """
        pod = await self._ask("GET", f"/api/v1/namespaces/{self._namespace}/pods/{self._name}")
        metadata = pod["metadata"]
        # A StatefulSet gives a replacement the name of the pod that it replaces.
        if self._uid and metadata["uid"] != self._uid:
            raise NotNowError("another pod has its name now")
        owners = metadata.get("ownerReferences", ())
        # Only the controller would start a replacement.
        controller = next((owner for owner in owners if owner.get("controller")), None)
        if controller is None:
            raise NotNowError("no controller would replace this pod")
        kind = controller["kind"]
        workload_name = controller["name"]
        template_hash = metadata.get("labels", {}).get("pod-template-hash")
        # Each rollout replaces a Deployment's ReplicaSet, but the Deployment's name stays the same.
        is_of_template = template_hash and workload_name.endswith(f"-{template_hash}")
        if kind == "ReplicaSet" and is_of_template:
            kind = "Deployment"
            workload_name = workload_name.removesuffix(f"-{template_hash}")
        self._lease_name = f"vllm-headroom-{kind.lower()}-{workload_name}"
        self._identity = f"{self._name}_{metadata['uid']}"
        if not any("readinessProbe" in container for container in pod["spec"]["containers"]):
            raise NotNowError(
                "no container has a readinessProbe: when a replacement serves is not known"
            )
        return pod

    async def _find_budget(self) -> Object:
        """Return the pod's PodDisruptionBudget.

        Raises NotNowError unless exactly one budget selects the pod and counts missing pods.
        """
        path = f"/apis/policy/v1/namespaces/{self._namespace}/poddisruptionbudgets"
        budgets = (await self._ask("GET", path))["items"]
        labels = self._pod["metadata"].get("labels", {})
        matching_budgets = [budget for budget in budgets if _selects(budget, labels)]
        if len(matching_budgets) != 1:
            count = len(matching_budgets) or "no"
            raise NotNowError(
                f"{count} PodDisruptionBudgets select this pod, by matchLabels alone: it needs one"
            )
        (budget,) = matching_budgets
        name = budget["metadata"]["name"]
        # If minAvailable is a number, the controller counts only existing pods.
        if isinstance(budget["spec"].get("minAvailable"), int):
            raise NotNowError(
                f"PodDisruptionBudget {name} does not count missing pods: it needs maxUnavailable"
            )
        return dict(budget)

    async def _check_budget(self) -> None:
        """Raise NotNowError if the pod's PodDisruptionBudget counts any of its pods as missing."""
        budget = await self._find_budget()
        if _counts_missing_pods(budget):
            healthy, expected = _count_pods(budget)
            name = budget["metadata"]["name"]
            raise NotNowError(
                f"a pod restarts: {healthy} of {expected} are healthy by PodDisruptionBudget {name}"
            )

    async def _read_lease(self) -> Object:
        """Return the Lease, or {} if it does not exist.

        A Lease that this pod has seen unchanged for its full duration counts as expired. The clocks
        of two machines are therefore never compared. Raises NotNowError while another pod holds the
        Lease.
        """
        try:
            lease = await self._ask("GET", f"{self._leases_path}/{self._lease_name}")
        except NotNowError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            return {}
        # Any write by the Lease's holder changes the version and restarts the duration.
        version = lease["metadata"]["resourceVersion"]
        if version != self._lease_version:
            self._lease_version = version
            self._lease_changed_at = self._clock.monotonic()
        spec = lease.get("spec", {})
        holder = spec.get("holderIdentity")
        lease_seconds = spec.get("leaseDurationSeconds") or LEASE_SECONDS
        has_expired = self._clock.monotonic() > self._lease_changed_at + lease_seconds
        if holder and holder != self._identity and not has_expired:
            raise NotNowError(f"{holder} holds Lease {self._lease_name}")
        return lease

    async def _take_lease(self, lease: Object, began_seconds: float) -> None:
        """Take or renew the Lease; `lease` was read after `began_seconds`.

        Raises NotNowError if another pod has changed the Lease since it was read. Also raises it if
        the API server refuses the request.
        """
        former_spec = lease.get("spec", {})
        now = to_datetime(self._clock.time()).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = former_spec | {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": LEASE_SECONDS,
            "renewTime": now,
        }
        if former_spec.get("holderIdentity") != self._identity:
            spec["acquireTime"] = now
            transitions = former_spec.get("leaseTransitions", 0)
            spec["leaseTransitions"] = transitions + 1 if lease else transitions
        self._lease = await self._write_lease(lease, spec)
        # For this pod, the duration starts before the pod reads the Lease. For another pod, it
        # starts later, when that pod reads the renewed Lease. Therefore, two pods never hold the
        # Lease at the same time.
        self._lease_held_until = began_seconds + LEASE_SECONDS

    async def _release(self) -> bool:
        """Give the Lease to the next pod.

        If writing fails, the Lease expires and the result is False.
        """
        self._lease_held_until = 0.0
        try:
            await self._write_lease(self._lease, self._lease["spec"] | {"holderIdentity": ""})
        except NotNowError:
            return False
        return True

    async def _write_lease(self, lease: Object, spec: Object) -> Object:
        """Write the Lease with this spec and return it as stored.

        If `lease` is empty, the Lease is created. Raises NotNowError if another pod has changed the
        Lease since `lease` was read. Also raises it if the API server refuses the request.
        """
        # The request contains the Lease's version as read. The API server therefore refuses to
        # overwrite a newer Lease.
        if lease:
            method = "PUT"
            path = f"{self._leases_path}/{self._lease_name}"
            new_lease = lease
        else:
            method = "POST"
            path = self._leases_path
            new_lease = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": self._lease_name},
            }
        try:
            return await self._ask(method, path, {**new_lease, "spec": spec})
        except NotNowError as error:
            if error.status == HTTPStatus.CONFLICT:
                raise NotNowError(
                    f"another pod was faster to take Lease {self._lease_name}"
                ) from None
            raise

    async def _evict(self) -> None:
        """Ask the API server to evict the pod; raise NotNowError if it refuses or fails."""
        # At least half of the Lease's duration must be left for the request itself.
        if self._clock.monotonic() > self._lease_held_until - LEASE_SECONDS / 2:
            raise NotNowError(
                "the API server took too long: the Lease could expire before the eviction"
            )
        path = f"/api/v1/namespaces/{self._namespace}/pods/{self._name}/eviction"
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": self._name, "namespace": self._namespace},
            # A StatefulSet gives the replacement the same name. The UID protects the replacement
            # from eviction.
            "deleteOptions": {"preconditions": {"uid": self._pod["metadata"]["uid"]}},
        }
        try:
            await self._ask("POST", path, body)
        except NotNowError as error:
            # Status 429 means that the PodDisruptionBudget does not allow the eviction.
            if error.status == HTTPStatus.TOO_MANY_REQUESTS:
                self._requests[EvictionResult.REFUSED] += 1
            else:
                self._requests[EvictionResult.FAILED] += 1
            raise

    async def _ask(self, method: str, path: str, body: Object | None = None) -> Object:
        """Return the object in the API server's response.

        Raises NotNowError in three cases:

        - There is no response.
        - The response reports a failure.
        - The response is not an object.
        """
        reply = await self._api.send(method, path, body)
        if isinstance(reply, Failure):
            raise NotNowError(f"the API server does not answer: {strip_advice(reply)}", 0)
        answer: object = None
        with suppress(ValueError, RecursionError):
            answer = json.loads(reply.text)
        message = "no object of Kubernetes"
        if isinstance(answer, dict):
            # Redirects are not followed. Even a response with status 201 may report a failure.
            is_success = HTTPStatus.OK <= reply.status < HTTPStatus.MULTIPLE_CHOICES
            if is_success and answer.get("status") != "Failure":
                return answer
            message = str(answer.get("message"))[:SHOWN_CHARACTERS]
        is_refusal = HTTPStatus.BAD_REQUEST <= reply.status < HTTPStatus.INTERNAL_SERVER_ERROR
        raise NotNowError(
            f"the API server answers {reply.status}: {message}", reply.status if is_refusal else 0
        )

    @property
    def _is_holder(self) -> bool:
        return self._clock.monotonic() < self._lease_held_until


def _count_pods(budget: Object) -> tuple[int, int]:
    """Return how many pods a PodDisruptionBudget counts as healthy, and how many it expects."""
    status = budget.get("status", {})
    return status.get("currentHealthy", 0), status.get("expectedPods", 1)


def _counts_missing_pods(budget: Object) -> bool:
    """Return whether a budget's status shows that a pod is missing or being evicted.

    The API server itself records an eviction in this status before it deletes the pod.
    """
    healthy, expected = _count_pods(budget)
    return healthy < expected or bool(budget.get("status", {}).get("disruptedPods"))


def _selects(budget: Object, labels: Object) -> bool:
    """Return whether a PodDisruptionBudget selects these labels.

    Returns False if the budget's selector contains anything other than matchLabels.
    """
    selector = budget["spec"].get("selector", {})
    if selector.keys() != {"matchLabels"}:
        return False
    return bool(selector["matchLabels"].items() <= labels.items())


def build_evictor(policy: EvictionPolicy, clock: Clock) -> Evictor | None:
    """Return the evictor for this pod.

    Outside of a pod, logs an error and returns None.
    """
    pod_api = open_pod_api(ACCOUNT, EVICTION_REQUEST_SECONDS)
    if pod_api is None:
        log.error(
            STAYS_OFF,
            problem=f"no pod with POD_NAME and a service account in {ACCOUNT}, which the component"
            " evict provides",
        )
        return None
    return Evictor(
        pod_api.reader, policy, namespace=pod_api.namespace, name=pod_api.name, clock=clock
    )


def build_evictor_of(
    policy: EvictionPolicy, clock: Clock, pod: EnginePod, uid: str
) -> Evictor | None:
    """Return the evictor for another pod, given its names and UID.

    Returns None if there is no token.
    """
    api = open_api(ACCOUNT, EVICTION_REQUEST_SECONDS)
    if api is None:
        return None
    return Evictor(api, policy, namespace=pod.namespace, name=pod.pod, uid=uid, clock=clock)
