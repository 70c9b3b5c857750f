"""Replicas that leak in step as processes: a daemon with the guardrail for each pod of a cluster, or none.

What the kubelets do is done here: a daemon is started for each pod and stopped once the pod is gone. The engines are
simulated, each from the start of its pod, and all alike: what a pod's daemon sees of its engine is known here, too.
"""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Final

from tests.e2e.evicting import LEAK, LOADING_SECONDS
from tests.fakes.api_server.cluster import LABELS, Answer, Cluster, Object, Pod
from tests.fakes.api_server.server import ApiServer
from tests.process import launch
from vllm_headroom_tools.demo.world import World

GRACE_SECONDS: Final = 0.5
STEP_SECONDS: Final = 0.1
HOURS: Final = 14


@cache
def list_runs() -> list[int]:
    """Return for each second of an engine's pod which of its runs serves, -1 for none."""
    world, runs = World(LEAK), []
    for second in range(HOURS * 3600):
        world.advance(second)
        runs.append(world.engine.number if world.is_serving else -1)
    return runs


@dataclass(kw_only=True)
class LeakingCluster(Cluster):
    """A cluster whose engines are the simulated ones, at so many times the clock's speed.

    `at` has each time that it was brought to, and `counts` how many replicas served then.
    """

    speed: float
    at: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    runs: dict[str, int] = field(default_factory=dict)
    most_voluntary: int = 0

    def began(self, pod: Pod) -> float:
        """Return when a pod's engine was started."""
        return pod.ready_at - self.load_seconds

    def run_of(self, pod: Pod) -> int:
        """Return which run of a pod's engine serves, -1 for none."""
        second = int((self.now - self.began(pod)) * self.speed)
        return list_runs()[min(second, HOURS * 3600 - 1)]

    def is_ready(self, pod: Pod) -> bool:
        return pod.gone_at == math.inf and self.run_of(pod) >= 0

    def advance(self, now: float) -> None:
        super().advance(now)
        self.at.append(now)
        self.counts.append(self.ready)
        for pod in self.pods.values():
            self.runs[pod.uid] = max(self.runs.get(pod.uid, 0), self.run_of(pod))

    def request(self, method: str, path: str, body: Object | None) -> Answer:
        answer = super().request(method, path, body)
        self.most_voluntary = max(self.most_voluntary, self.voluntary)
        return answer

    @property
    def out_of_memory(self) -> int:
        """How many engines ran out of memory, and loaded again."""
        return sum(self.runs.values())

    @property
    def nobody_seconds(self) -> float:
        """For how long no replica served."""
        return sum(
            next_seconds - at
            for (at, next_seconds), ready in zip(pairwise(self.at), self.counts, strict=False)
            if not ready
        )

    @property
    def restart_seconds(self) -> float:
        """How long one restart takes at most, as it is seen."""
        return (
            self.load_seconds
            + self.grace_seconds
            + 2 * max(next_seconds - at for at, next_seconds in pairwise(self.at))
        )

    def fewer_than(self, other_cluster: LeakingCluster) -> float:
        """Return for how long at a stretch fewer replicas served than in another cluster with the same times."""
        longest, since = 0.0, math.inf
        for at, mine, theirs in zip(self.at, self.counts, other_cluster.counts, strict=True):
            since = min(since, at) if mine < theirs else math.inf
            longest = max(longest, at - since)
        return longest


@dataclass(kw_only=True)
class Situation:
    """What is played: times in seconds from the start, but `served_hours`, `near_hours` and `hours_apart` simulated."""

    replicas: int
    speed: float
    seconds: float
    served_hours: float = 0.0
    near_hours: float = 3.0
    restart_at: tuple[float, ...] = ()
    gone: tuple[float, float] = (math.inf, math.inf)
    hours_apart: float = 0.0
    budget: int = 1

    def make_cluster(self) -> LeakingCluster:
        cluster = LeakingCluster(
            replicas=self.replicas,
            speed=self.speed,
            load_seconds=LOADING_SECONDS / self.speed,
            grace_seconds=GRACE_SECONDS,
            budgets=({"selector": {"matchLabels": LABELS}, "maxUnavailable": self.budget},),
        )
        for pod in cluster.pods.values():
            pod.ready_at = -self.served_hours * 3600 / self.speed
        return cluster


class Kubelets:
    """Runs a daemon for each pod of an API server's cluster; at the end, none."""

    def __init__(self, api: ApiServer, cluster: LeakingCluster, situation: Situation, folder: Path) -> None:
        self._api, self._cluster, self._situation, self._folder = api, cluster, situation, folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.log = folder / "log"

    def sync(self, pods: Sequence[Pod], *, restart: bool = False) -> None:
        """Stop the daemons of pods that are gone, or all, and start those that are missing."""
        gone_uids = [uid for uid in self._running if restart or uid not in {pod.uid for pod in pods}]
        ending = [self._running.pop(uid) for uid in gone_uids]
        for process in ending:
            process.terminate()
        for process in ending:
            process.wait(30)
        for place, pod in enumerate(pods):
            if pod.uid not in self._running:
                self._running[pod.uid] = self._start(pod, place)

    def close(self) -> None:
        self.sync(())

    def _start(self, pod: Pod, place: int) -> subprocess.Popen[bytes]:
        """Start the daemon of a pod; its history outlives a restart of it."""
        speed, apart = self._situation.speed, self._situation.hours_apart * 3600
        return launch(
            self.log,
            "demo",
            *("--speed", f"{speed:g}", "--sample-interval-seconds", "120"),
            module="tests.e2e.evicting",
            ACCOUNT=str(self._folder),
            BEGAN=repr(self._api.began + self._cluster.began(pod)),
            CLOCK_APART=f"{(-1) ** place * apart * place / self._situation.replicas:g}",
            STATE_DIR=str(self._folder / pod.uid),
            EVICT="on",
            EVICT_SECONDS=f"{self._situation.near_hours * 3600:g}",
            **self._api.environment(pod.name),
        )


def play(situation: Situation, folder: Path) -> tuple[LeakingCluster, LeakingCluster]:
    """Return the cluster after the situation with the guardrail, and the same one without."""
    guarded, plain = situation.make_cluster(), situation.make_cluster()
    restarts = list(situation.restart_at)
    with ApiServer(guarded, folder) as api, closing(Kubelets(api, guarded, situation, folder)) as kubelets:
        api.fault = lambda _: "gone" if situation.gone[0] <= time.monotonic() - api.began < situation.gone[1] else ""
        while (now := time.monotonic() - api.began) < situation.seconds:
            with api.lock:
                guarded.advance(now)
                pods = list(guarded.pods.values())
            is_due = bool(restarts) and restarts[0] <= now
            restarts = restarts[is_due:]
            kubelets.sync(pods, restart=is_due)
            time.sleep(STEP_SECONDS)
    for now in guarded.at:
        plain.advance(now)
    return guarded, plain
