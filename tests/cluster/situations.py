"""What happens to engines in a cluster, as data: the steps, and what has to arrive at PagerDuty."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing that is done: a method of `Workload` and its arguments."""

    do: str
    arguments: tuple[object, ...] = ()
    after_seconds: float = 0.0
    """How long after the step before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A situation; exactly one of `alerts` has to open an incident, none where nobody is to be called.

    They are several where it depends on when the rules are evaluated.
    """

    name: str
    text: str
    replicas: int = 1
    steps: tuple[Step, ...] = ()
    alerts: frozenset[str] = frozenset()
    needs_own_cluster: bool = False
    """Whether it stops parts of the cluster itself."""
    is_played_last: bool = False
    """Whether it begins when all others have ended, since it leaves the cluster without its node."""
    load_seconds: int = 5
    """How long the start of each new pod's engine takes."""
    has_web_config: bool = False
    """Whether the sidecar has a web.config.yml, from a Secret."""
    has_own_prometheus: bool = False
    """Whether a Prometheus and an Alertmanager watch it alone."""
    has_rules_twice: bool = False
    """Whether that Prometheus has the rules of two namespaces."""


def step(do: str, *arguments: object, after_seconds: float = 0.0) -> Step:
    return Step(do=do, arguments=arguments, after_seconds=after_seconds)


def _build_crash(name: str, load_seconds: float, words: str, *alerts: str) -> Situation:
    return Situation(
        name=name,
        text=f"a lone engine dies once under load, and loads for {words}",
        steps=(step("load_for", load_seconds), step("order", "die")),
        alerts=frozenset(alerts),
    )


SITUATIONS: Final = (
    Situation(name="healthy", text="the example, under load"),
    Situation(name="rollout", text="a rollout of three replicas", replicas=3, steps=(step("restart"),)),
    Situation(
        name="to-zero",
        text="scaled to zero, and back after three minutes",
        steps=(step("scale", 0), step("scale", 1, after_seconds=180)),
    ),
    Situation(name="drain", text="the node of three replicas is drained", replicas=3, steps=(step("drain"),)),
    Situation(
        name="crash-loop",
        text="one engine of two dies 10 s after each start",
        replicas=2,
        steps=(step("order_each_start", "after 10", "die"), step("order", "die")),
        alerts=frozenset({"HeadroomEngineCrashLoop"}),
    ),
    Situation(
        name="crash",
        text="one engine of two dies once under load, and loads for a minute",
        replicas=2,
        steps=(step("load_for", 60), step("order", "die")),
        alerts=frozenset({"HeadroomEngineDied"}),
    ),
    # A page is due where nothing serves at two evaluations, which are 30 s apart.
    _build_crash("crash-half-minute", 30, "half a minute", "HeadroomModelDown", "HeadroomEngineDied"),
    _build_crash("crash-one-minute", 60, "a minute", "HeadroomModelDown", "HeadroomEngineDied"),
    _build_crash("crash-two-minutes", 120, "two minutes", "HeadroomModelDown"),
    _build_crash("crash-five-minutes", 300, "five minutes", "HeadroomModelDown"),
    Situation(
        name="oom-kill",
        text="the kernel kills the core of a lone engine at its memory limit, and the next start takes two minutes",
        steps=(step("load_for", 120), step("order", "oom")),
        alerts=frozenset({"HeadroomModelDown"}),
    ),
    Situation(
        name="host-oom",
        text="the host has no memory for a lone engine below its limit: the kernel kills the core, two minutes to load",
        steps=(step("load_for", 120), step("fill_host"), step("order", "oom")),
        alerts=frozenset({"HeadroomModelDown"}),
        needs_own_cluster=True,
    ),
    Situation(
        name="start-fails",
        text="a lone engine dies once under load, and each start after that fails while it loads",
        steps=(step("fail_starts"), step("order", "die")),
        alerts=frozenset({"HeadroomModelDown"}),
    ),
    Situation(
        name="rollout-fails",
        text="a rollout of two replicas to a version of which each start fails while it loads",
        replicas=2,
        steps=(step("roll_out_failing"),),
        alerts=frozenset({"HeadroomEngineCrashLoop"}),
    ),
    Situation(
        name="kubelet-evicts",
        text="the kubelet evicts a lone engine that fills its disk, and the next pod loads for two minutes",
        load_seconds=120,
        steps=(step("fill_disk"),),
        alerts=frozenset({"HeadroomModelDown"}),
    ),
    Situation(
        name="kubelet-evicts-one",
        text="the kubelet evicts one engine of two that fills its disk",
        replicas=2,
        steps=(step("fill_disk"),),
    ),
    Situation(
        name="autoscaled",
        text="a HorizontalPodAutoscaler asks for a third replica while two are rolled out",
        replicas=2,
        steps=(step("restart"), step("autoscale", 3)),
    ),
    Situation(
        name="hang",
        text="one engine of two has requests and makes no progress; /health answers",
        replicas=2,
        steps=(step("order", "hang"),),
        alerts=frozenset({"HeadroomEngineStalled"}),
    ),
    Situation(
        name="stopped",
        text="the engine exits by itself with status 0 while it is idle, and starts again",
        steps=(step("order", "idle"), step("order", "exit", after_seconds=60)),
    ),
    Situation(
        name="sidecar-killed",
        text="kill -9 of the sidecar",
        steps=(step("signal_sidecar", int(signal.SIGKILL)),),
    ),
    Situation(
        name="sidecar-frozen",
        text="the sidecar is frozen (SIGSTOP)",
        steps=(step("signal_sidecar", int(signal.SIGSTOP)),),
    ),
    Situation(
        name="sidecar-upgraded",
        text="the sidecar's image is changed in a running pod",
        steps=(step("upgrade_sidecar"),),
    ),
    Situation(
        name="no-image",
        text="a rollout of two replicas to an image that cannot be pulled",
        replicas=2,
        steps=(step("set_image", "localhost/none:1"),),
    ),
    Situation(
        name="wrong-label",
        text="a rollout takes the label away by which the PodMonitor selects the pods",
        steps=(step("take_label_away"),),
        alerts=frozenset({"HeadroomAbsent"}),
    ),
    Situation(
        name="web-config",
        text="the Secret with the sidecar's web.config.yml is spoiled, and one pod of two is evicted after that",
        replicas=2,
        steps=(step("spoil_web_config"), step("evict", after_seconds=100)),
        alerts=frozenset({"HeadroomDown"}),
        has_web_config=True,
    ),
    Situation(
        name="api-server",
        text="the API server is away for 20 s",
        steps=(step("restart_api_server", after_seconds=500),),  # Helm has ended then, which does not wait for it
        needs_own_cluster=True,
    ),
    Situation(
        name="prometheus-away",
        text="Prometheus is away for three minutes; meanwhile one engine of two dies and loads for a minute",
        replicas=2,
        steps=(
            step("load_for", 60),
            step("stop_prometheus"),
            step("order", "die"),
            step("start_prometheus", after_seconds=180),
        ),
        alerts=frozenset({"HeadroomEngineDied"}),
        has_own_prometheus=True,
    ),
    Situation(
        name="rules-twice",
        text="the rules are in the cluster twice; a lone engine dies once under load, and loads for two minutes",
        steps=(step("load_for", 120), step("order", "die")),
        alerts=frozenset({"HeadroomModelDown"}),
        has_own_prometheus=True,
        has_rules_twice=True,
    ),
    Situation(
        name="node-lost",
        text="the node of a lone engine is lost: its kubelet ends, then the containers",
        steps=(step("lose_node"),),
        alerts=frozenset({"HeadroomModelDown"}),
        needs_own_cluster=True,
        is_played_last=True,
    ),
)
