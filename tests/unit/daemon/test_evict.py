"""What the guardrail asks the API server for, when it waits, and what it reports about it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from tests.fakes.api_server.cluster import LABELS, NAMESPACE, ROLE, Cluster, Object
from tests.fakes.api_server.fleet import Clock, Connection
from tests.fakes.api_server.server import ApiServer
from tests.fakes.certificates import write_self_signed
from tests.logs import capture_logs
from tests.settings import load
from vllm_headroom.daemon import evict
from vllm_headroom.daemon.evict import LEASE_SECONDS, TURN_SECONDS, EvictionPolicy, Evictor
from vllm_headroom.daemon.parts import build_real_evictor
from vllm_headroom.model import Failure
from vllm_headroom.scrape.http.reader import Reply

DUE: Final = "GPU 0 leaks and may be out of memory in 25 min"
LEASE: Final = "vllm-headroom-deployment-vllm"
WRITES: Final = {"create pods/eviction", "create leases", "update leases"}


class Bench:
    """A cluster, and evictors of its pods on one clock."""

    def __init__(self, mode: str = "on", **cluster_fields: Any) -> None:
        self.cluster = Cluster(**{"replicas": 4, **cluster_fields})
        self.clock = Clock(monotonic_offset=5000.0)
        self.fault: Callable[[str], str] = lambda _: ""
        self._mode = mode

    def evictor(self, place: int = 0, clock: Clock | None = None) -> Evictor:
        """Return the evictor of a sidecar that has just started in the pod at this place."""
        connection = Connection(self.cluster, lambda path: self.fault(path))  # noqa: PLW0108 - it changes
        name = list(self.cluster.pods)[place]
        policy = EvictionPolicy(is_dry_run=self._mode == "dry-run", near_seconds=1800.0, quiet_hour=None)
        return Evictor(connection, policy, namespace=NAMESPACE, name=name, clock=clock or self.clock)

    def turn(self, *evictors: Evictor, due: str | None = DUE, seconds: float = TURN_SECONDS) -> None:
        """Let time pass in turns of all of them at once, at least one."""

        async def turns() -> None:
            for _ in range(max(1, int(seconds / TURN_SECONDS))):
                await asyncio.gather(*(evictor.turn(due) for evictor in evictors))
                self.clock.now += TURN_SECONDS
                self.cluster.advance(self.clock.now)

        asyncio.run(turns())

    @property
    def lease(self) -> Object:
        return dict(self.cluster.leases[LEASE]["spec"])


def counted(evictor: Evictor) -> dict[str, int]:
    return {str(result): count for result, count in evictor.read_guardrail().requests if count}


def problems(events: list[dict[str, Any]]) -> list[str]:
    return [event["problem"] for event in events if event["event"] == "eviction of this pod waits"]


def test_it_takes_the_lease_and_asks_for_its_own_pod() -> None:
    bench = Bench()
    evictor = bench.evictor()
    with capture_logs() as events:
        bench.turn(evictor)

    pod = next(iter(bench.cluster.pods.values()))
    assert counted(evictor) == {"accepted": 1}
    assert evictor.read_guardrail().is_holder
    assert pod.gone_at == bench.cluster.grace_seconds, "the pod keeps its grace"
    assert set(bench.cluster.asked) <= ROLE
    assert bench.lease["holderIdentity"] == f"{pod.name}_{pod.uid}"
    assert [(event["event"], event["why"]) for event in events] == [("asked for the eviction of this pod", DUE)]


def test_without_a_leak_it_asks_for_nothing() -> None:
    bench = Bench()
    bench.turn(bench.evictor(), due=None, seconds=3600)

    assert bench.cluster.asked == []


@pytest.mark.parametrize(("is_stateful", "name"), [(False, LEASE), (True, "vllm-headroom-statefulset-vllm")])
def test_the_lease_is_the_workloads(is_stateful: bool, name: str) -> None:  # noqa: FBT001 - a parameter of the test
    bench = Bench(is_stateful=is_stateful)
    bench.turn(bench.evictor())

    assert set(bench.cluster.leases) == {name}


def test_of_replicas_that_ask_at_once_one_is_evicted() -> None:
    bench = Bench(budgets=({"selector": {"matchLabels": LABELS}, "maxUnavailable": 4},))
    evictors = [bench.evictor(place) for place in range(4)]
    with capture_logs() as events:
        bench.turn(*evictors)

    assert [counted(evictor) for evictor in evictors].count({"accepted": 1}) == 1
    assert problems(events) == [f"another pod was faster to take Lease {LEASE}"] * 3


def test_the_next_waits_until_the_lease_has_not_changed_for_its_duration_here_and_all_are_healthy() -> None:
    bench = Bench(load_seconds=30.0, grace_seconds=20.0)
    first_evictor, clock = bench.evictor(0), Clock(offset=7200.0)  # two hours ahead: of no consequence
    bench.turn(first_evictor)
    second = bench.evictor(1, clock)
    for _ in range(LEASE_SECONDS // int(TURN_SECONDS) + 1):
        clock.now = bench.clock.now
        bench.turn(second)
        assert counted(second) == {}
    clock.now = bench.clock.now
    bench.turn(second)

    assert bench.cluster.voluntary == 1
    assert counted(second) == {"accepted": 1}


def test_as_its_last_act_the_holder_gives_the_lease_back_and_the_next_waits_for_the_replacement_alone() -> None:
    bench = Bench(load_seconds=30.0)
    first_evictor, second = bench.evictor(0), bench.evictor(1)
    bench.turn(first_evictor)
    with capture_logs() as events:
        asyncio.run(first_evictor.give_lease_back())
    assert [event["event"] for event in events] == ["Lease given back to the next pod"]
    assert bench.lease["holderIdentity"] == ""

    with capture_logs() as events:
        bench.turn(second)
    assert problems(events) == ["a pod restarts: 3 of 4 are healthy by PodDisruptionBudget vllm-0"]
    bench.turn(second, seconds=30.0)

    assert counted(second) == {"accepted": 1}
    assert bench.cluster.voluntary == 1


def test_the_lease_is_given_back_though_the_shutdown_cut_off_the_answer_to_its_renewal() -> None:
    bench = Bench(load_seconds=30.0)
    evictor = bench.evictor()
    bench.turn(evictor)
    faults = iter(["", "cut"])  # it reads the Lease, and renews it without an answer
    bench.fault = lambda _: next(faults, "")
    bench.turn(evictor)
    asyncio.run(evictor.give_lease_back())

    assert bench.lease["holderIdentity"] == ""


def test_a_lease_that_cannot_be_written_is_not_reported_as_given_back() -> None:
    bench = Bench(load_seconds=30.0)
    evictor = bench.evictor()
    bench.turn(evictor)
    faults = iter(["", "", "cut"])  # it reads the budget and the Lease, and its write gets no answer
    bench.fault = lambda _: next(faults, "")
    with capture_logs() as events:
        asyncio.run(evictor.give_lease_back())

    assert events == []


@pytest.mark.parametrize("fault", ["", "cut"])
def test_the_lease_is_not_given_back_where_the_budget_need_not_know_of_the_eviction(fault: str) -> None:
    """Where the eviction got no answer, or the status does not count it yet."""
    bench = Bench()
    bench.fault = lambda path: fault if path.endswith("/eviction") else ""
    evictor = bench.evictor()
    bench.turn(evictor)
    for budget in bench.cluster._budgets:  # as of a controller that lags
        budget["status"] |= {"disruptedPods": {}, "currentHealthy": 4}
    asyncio.run(evictor.give_lease_back())

    assert bench.lease["holderIdentity"]


def test_the_next_waits_for_a_replacement_that_is_slower_than_the_lease() -> None:
    bench = Bench(load_seconds=1800.0)
    first_evictor, second = bench.evictor(0), bench.evictor(1)
    bench.turn(first_evictor)
    with capture_logs() as events:
        bench.turn(second, seconds=1780)
    assert counted(second) == {}
    bench.turn(second, seconds=30)

    assert counted(second) == {"accepted": 1}
    assert problems(events)[-1] == "a pod restarts: 3 of 4 are healthy by PodDisruptionBudget vllm-0"


def test_the_holder_renews_until_its_pod_is_gone() -> None:
    bench = Bench(grace_seconds=1800.0)
    evictor = bench.evictor()
    bench.turn(evictor, seconds=600)
    bench.turn(evictor, due=None, seconds=600)

    assert evictor.read_guardrail().is_holder
    assert bench.lease["leaseTransitions"] == 0
    assert bench.cluster.asked.count("create pods/eviction") == 1


def test_a_sidecar_that_starts_again_holds_what_its_pod_held() -> None:
    bench = Bench()
    bench.fault = lambda path: "cut" if path.endswith("/leases") else ""  # taken, and the answer is lost
    bench.turn(bench.evictor())
    bench.fault = lambda _: ""
    assert bench.lease["holderIdentity"].startswith(next(iter(bench.cluster.pods)))
    again = bench.evictor()
    bench.turn(again)

    assert counted(again) == {"accepted": 1}


@pytest.mark.parametrize(
    ("cluster_fields", "problem"),
    [
        ({"has_controller": False}, "no controller would replace this pod"),
        ({"has_readiness": False}, "no container has a readinessProbe: when a replacement serves is not known"),
        ({"budgets": ()}, "no PodDisruptionBudgets select this pod, by matchLabels alone: it needs one"),
        (
            {"budgets": ({"selector": {}, "maxUnavailable": 1},)},
            "no PodDisruptionBudgets select this pod, by matchLabels alone: it needs one",
        ),
        (
            {"budgets": ({"selector": {"matchLabels": LABELS, "matchExpressions": []}, "maxUnavailable": 1},)},
            "no PodDisruptionBudgets select this pod, by matchLabels alone: it needs one",
        ),
        (
            {"budgets": ({"selector": {"matchLabels": LABELS}, "maxUnavailable": 1},) * 2},
            "2 PodDisruptionBudgets select this pod, by matchLabels alone: it needs one",
        ),
        (
            {"budgets": ({"selector": {"matchLabels": LABELS}, "minAvailable": 1},)},
            "PodDisruptionBudget vllm-0 does not count missing pods: it needs maxUnavailable",
        ),
        ({"verbs": ROLE - {"get pods"}}, "the API server answers 403: pods is forbidden"),
        (
            {"verbs": ROLE - {"list poddisruptionbudgets"}},
            "the API server answers 403: poddisruptionbudgets is forbidden",
        ),
        ({"verbs": ROLE - {"get leases"}}, "the API server answers 403: leases is forbidden"),
        ({"verbs": ROLE - {"create leases"}}, "the API server answers 403: leases is forbidden"),
    ],
)
def test_it_waits_and_says_why_once(cluster_fields: dict[str, Any], problem: str) -> None:
    bench = Bench(**cluster_fields)
    evictor = bench.evictor()
    with capture_logs() as events:
        bench.turn(evictor, seconds=3600)
        bench.turn(evictor, due=None, seconds=400)

    (reported_problem,) = problems(events)
    assert reported_problem.startswith(problem)
    assert counted(evictor) == {}
    assert bench.cluster.leases == {}
    assert events[-1]["event"] == "eviction of this pod is not due any more"


@pytest.mark.parametrize(
    ("cluster_fields", "result", "problem"),
    [
        (
            {"budgets": ({"selector": {"matchLabels": LABELS}, "maxUnavailable": 0},)},
            "refused",
            "the API server answers 429: Cannot evict pod as it would violate the pod's disruption budget.",
        ),
        (
            {"verbs": ROLE - {"create pods/eviction"}},
            "failed",
            "the API server answers 403: pods/eviction is forbidden",
        ),
    ],
)
def test_a_refused_eviction_is_counted_and_asked_for_again_ever_more_seldom(
    cluster_fields: dict[str, Any], result: str, problem: str
) -> None:
    bench = Bench(**cluster_fields)
    evictor = bench.evictor()
    with capture_logs() as events:
        bench.turn(evictor, seconds=3600)

    eviction_count = bench.cluster.asked.count("create pods/eviction")
    assert 10 < eviction_count < 20, "after 20, 40, ... and then every 320 s"
    assert counted(evictor) == {result: eviction_count}
    assert [reported_problem.startswith(problem) for reported_problem in problems(events)] == [True]
    assert not evictor.read_guardrail().is_holder
    assert bench.lease["holderIdentity"] == "", "others may try"


def test_where_the_answer_to_an_eviction_is_lost_nobody_is_let_in_before_the_lease_expires() -> None:
    bench = Bench(budgets=({"selector": {"matchLabels": LABELS}, "maxUnavailable": 4},))
    bench.fault = lambda path: "gone" if path.endswith("/eviction") else ""
    first_evictor, second = bench.evictor(0), bench.evictor(1)
    bench.turn(first_evictor)
    assert counted(first_evictor) == {"failed": 1}
    bench.turn(second, seconds=LEASE_SECONDS)
    assert counted(second) == {}
    bench.fault = lambda _: ""
    bench.turn(second, seconds=20)

    assert counted(second) == {"accepted": 1}


@pytest.mark.parametrize("fault", ["gone", "cut"])
def test_an_api_server_that_does_not_answer_changes_nothing(fault: str) -> None:
    bench = Bench()
    bench.fault = lambda _: fault
    evictor = bench.evictor()
    with capture_logs() as events:
        bench.turn(evictor, seconds=3600)
    assert problems(events) == ["the API server does not answer: it hangs"]
    assert len(bench.cluster.asked) < 20
    assert not WRITES & set(bench.cluster.asked)
    bench.fault = lambda _: ""
    bench.turn(evictor, seconds=330)

    assert counted(evictor) == {"accepted": 1}


def test_a_lease_that_may_expire_before_the_eviction_is_not_used() -> None:
    bench = Bench()

    def slow(path: str) -> str:
        bench.clock.now += 61.0 if path.endswith("/leases") else 0.0
        return ""

    bench.fault = slow
    evictor = bench.evictor()
    with capture_logs() as events:
        bench.turn(evictor)

    assert "create pods/eviction" not in bench.cluster.asked
    assert problems(events) == ["the API server took too long: the Lease could expire before the eviction"]


def test_where_no_eviction_is_due_any_more_the_lease_is_free() -> None:
    bench = Bench()
    bench.fault = lambda path: "gone" if path.endswith("/eviction") else ""
    evictor = bench.evictor()
    bench.turn(evictor)
    assert evictor.read_guardrail().is_holder
    bench.turn(evictor, due=None, seconds=30)

    assert not evictor.read_guardrail().is_holder
    assert bench.lease["holderIdentity"] == ""


def test_a_dry_run_reads_says_what_it_would_do_and_counts_it_once_a_leak() -> None:
    bench = Bench("dry-run")
    evictor = bench.evictor()
    with capture_logs() as events:
        bench.turn(evictor, seconds=3600)
        bench.turn(evictor, due=None)
        bench.turn(evictor)

    assert counted(evictor) == {"dry_run": 2}
    assert not WRITES & set(bench.cluster.asked)
    assert [event["event"] for event in events] == ["would ask for the eviction of this pod"] * 2
    assert not evictor.read_guardrail().is_holder


def test_a_pod_of_the_same_name_that_came_after_is_not_evicted() -> None:
    bench = Bench(is_stateful=True)
    evictor = bench.evictor()
    bench.fault = lambda path: "gone" if path.endswith("/eviction") else ""
    bench.turn(evictor)
    bench.cluster.pods["vllm-0"].uid = "another"
    bench.fault = lambda _: ""
    bench.turn(evictor, seconds=30)

    assert counted(evictor) == {"failed": 2}
    assert bench.cluster.voluntary == 0


@pytest.mark.parametrize("text", ["", "<html>", "[]", "{}", '{"items": 3}', '{"metadata": null}', "null"])
@pytest.mark.parametrize("status", [200, 502])
def test_nonsense_changes_nothing(text: str, status: int) -> None:
    bench = Bench()

    class Nonsense(Connection):
        async def send(self, *_: Any) -> Reply | Failure:
            return Reply(status=status, text=text)

    policy = EvictionPolicy(is_dry_run=False, near_seconds=1800.0, quiet_hour=None)
    evictor = Evictor(Nonsense(bench.cluster), policy, namespace=NAMESPACE, name="vllm-0", clock=bench.clock)
    with capture_logs() as events:
        bench.turn(evictor, seconds=3600)

    assert len(problems(events)) == 1
    assert counted(evictor) == {}


@pytest.mark.parametrize(
    ("status", "text"),
    [(307, '{"kind": "Status"}'), (302, "{}"), (201, "[]"), (201, "null"), (200, "<html>"), (201, "[" * 9000)],
)
def test_an_answer_to_an_eviction_that_accepts_nothing_is_a_failure(status: int, text: str) -> None:
    bench = Bench()

    class Odd(Connection):
        async def send(self, method: str, path: str, body: Any) -> Reply | Failure:
            if path.endswith("/eviction"):
                return Reply(status=status, text=text)
            return await super().send(method, path, body)

    policy = EvictionPolicy(is_dry_run=False, near_seconds=1800.0, quiet_hour=None)
    name = next(iter(bench.cluster.pods))
    api = Odd(bench.cluster, lambda _: "")
    evictor = Evictor(api, policy, namespace=NAMESPACE, name=name, clock=bench.clock)
    bench.turn(evictor)

    assert counted(evictor) == {"failed": 1}


def test_the_pod_that_took_the_name_of_the_engines_pod_is_not_evicted() -> None:
    bench = Bench(is_stateful=True)
    policy = EvictionPolicy(is_dry_run=False, near_seconds=1800.0, quiet_hour=None)
    pod = next(iter(bench.cluster.pods.values()))
    evictors = [
        Evictor(
            Connection(bench.cluster, lambda _: ""),
            policy,
            namespace=NAMESPACE,
            name=pod.name,
            uid=uid,
            clock=bench.clock,
        )
        for uid in ("of-the-former-pod", pod.uid)
    ]
    with capture_logs() as events:
        bench.turn(*evictors)

    assert problems(events) == ["another pod has its name now"]
    assert [counted(evictor) for evictor in evictors] == [{}, {"accepted": 1}]


IN_A_POD: Final = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443", "POD_NAME": "vllm-0"}


@pytest.mark.parametrize("lacks", [*IN_A_POD, "namespace", "token", None])
def test_outside_of_a_pod_it_stays_off_and_says_so(
    lacks: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evict, "ACCOUNT", tmp_path)
    for file in {"namespace", "token"} - {lacks}:
        (tmp_path / file).write_text("llm")
    for name, value in IN_A_POD.items():
        monkeypatch.delenv(name, raising=False)
        if name != lacks:
            monkeypatch.setenv(name, value)
    with capture_logs() as events:
        evictor = build_real_evictor(load([], {"HEADROOM_EVICT": "on"}), Clock())

    assert (evictor is None) is (lacks is not None)
    assert [event["event"] for event in events] == ([] if lacks is None else ["HEADROOM_EVICT stays off"])
    assert build_real_evictor(load([], {}), Clock()) is None


def test_it_connects_where_the_pod_is_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evict, "ACCOUNT", tmp_path)
    for file in ("namespace", "token"):
        (tmp_path / file).write_text("llm\n")
    for name, value in {**IN_A_POD, "KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    evictor = build_real_evictor(load([], {"HEADROOM_EVICT": "on"}), Clock())
    assert evictor is not None

    async def ask() -> None:
        await evictor.turn(DUE)
        await evictor.close()

    with capture_logs() as events:
        asyncio.run(ask())

    (problem,) = problems(events)
    assert problem.startswith(f"the API server does not answer: the CA file {tmp_path / 'ca.crt'} cannot be used (")


def test_the_log_quotes_what_tls_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an authority of another cluster would be, or one that has expired."""
    monkeypatch.setattr(evict, "ACCOUNT", tmp_path)
    with ApiServer(Cluster(replicas=2), tmp_path) as api:
        write_self_signed(tmp_path, "ca")
        for name, value in api.environment("vllm-0").items():
            monkeypatch.setenv(name, value)
        evictor = build_real_evictor(load([], {"HEADROOM_EVICT": "on"}), Clock())
        assert evictor is not None
        with capture_logs() as events:
            asyncio.run(evictor.turn(DUE))

    (problem,) = problems(events)
    assert problem.startswith("the API server does not answer: TLS with https://127.0.0.1:")
    assert "certificate verify failed: self-signed certificate" in problem
    assert "\n" not in problem
