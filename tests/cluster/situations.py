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
    """A situation; `alerts` are those that open an incident, none where nobody is to be called."""

    name: str
    text: str
    replicas: int = 1
    steps: tuple[Step, ...] = ()
    alerts: frozenset[str] = frozenset()


def step(do: str, *arguments: object, after_seconds: float = 0.0) -> Step:
    return Step(do=do, arguments=arguments, after_seconds=after_seconds)


SITUATIONS: Final = (
    Situation(name="healthy", text="the example, under load"),
    Situation(name="rollout", text="a rollout of three replicas", replicas=3, steps=(step("restart"),)),
    Situation(
        name="to-zero",
        text="scaled to zero, and back after three minutes",
        steps=(step("scale", 0), step("scale", 1, after_seconds=180)),
    ),
    Situation(name="evicted", text="a pod of three is evicted, as by a drain", replicas=3, steps=(step("evict"),)),
    Situation(
        name="crash-loop",
        text="one engine of three dies 10 s after each start",
        replicas=3,
        steps=(step("order_each_start", "after 10", "die"), step("order", "die")),
        alerts=frozenset({"HeadroomEngineCrashLoop"}),
    ),
    Situation(
        name="crash",
        text="one engine of three dies once under load, and loads for a minute",
        replicas=3,
        steps=(step("load_for", 60), step("order", "die")),
        alerts=frozenset({"HeadroomEngineDied"}),
    ),
    Situation(
        name="oom-kill",
        text="the kernel kills the core of a lone engine at its memory limit, and the next start takes two minutes",
        steps=(step("load_for", 120), step("order", "oom")),
        alerts=frozenset({"HeadroomModelDown"}),
    ),
    Situation(
        name="hang",
        text="one engine of three has requests and makes no progress; /health answers",
        replicas=3,
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
        name="no-image",
        text="a rollout of three replicas to an image that cannot be pulled",
        replicas=3,
        steps=(step("set_image", "localhost/none:1"),),
    ),
)
