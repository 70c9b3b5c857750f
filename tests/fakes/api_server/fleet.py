"""Replicas whose engines leak, with the guardrail beside each or without: hours of it on simulated clocks."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from tests.fakes.api_server.cluster import Cluster, Pod
from vllm_headroom.daemon.evict import TURN_SECONDS, EvictionPolicy, Evictor
from vllm_headroom.model import Failure
from vllm_headroom.scrape.http.reader import PageReader, Reply
from vllm_headroom.vocabulary import Reason, Source

STEP_SECONDS = 5.0
LATE_SECONDS = 50.0
"""After which a proxy may pass on a request whose sender has given up."""

NO_ANSWER = Failure(source=Source.ENGINE, reason=Reason.TIMEOUT, message="it hangs: look at it")


@dataclass(kw_only=True)
class Clock:
    """A machine's clocks: the simulated time, and how far each is from it."""

    now: float = 0.0
    monotonic_offset: float = 0.0
    offset: float = 0.0

    def time(self) -> float:
        return 1_760_000_000.0 + self.now + self.offset

    def monotonic(self) -> float:
        return self.now + self.monotonic_offset

    async def sleep_until(self, monotonic_seconds: float) -> None:
        raise NotImplementedError


class Connection(PageReader):
    """Lets others run between two requests; `fault` is "gone" or "late" for a request, or "cut" for its answer."""

    def __init__(self, cluster: Cluster, fault: Callable[[str], str] = lambda _: "") -> None:
        self._cluster, self._fault = cluster, fault

    async def send(self, method: str, path: str, body: Mapping[str, object] | None) -> Reply | Failure:
        await asyncio.sleep(0)
        fault = self._fault(path)
        if fault == "gone":
            return NO_ANSWER
        if fault == "late":
            self._cluster.late.append((self._cluster.now + LATE_SECONDS, method, path, dict(body or {})))
            return NO_ANSWER
        status, answer = self._cluster.request(method, path, None if body is None else dict(body))
        await asyncio.sleep(0)
        return NO_ANSWER if fault == "cut" else Reply(status=status, text=json.dumps(answer))

    async def close(self) -> None:
        """Do nothing."""


@dataclass(kw_only=True)
class Fleet:
    """`life_seconds` after an engine began to serve it is out of memory; its leak is sure after a quarter of that.

    `spread_seconds` lie between the first engines' ends. `fault` says what becomes of a request at a time; every
    `restart_seconds` all sidecars are started again.
    """

    cluster: Cluster
    life_seconds: float = 10_800.0
    near_seconds: float = 1800.0
    spread_seconds: float = 0.0
    has_guardrail: bool = True
    fault: Callable[[float, str], str] = lambda _at, _path: ""
    restart_seconds: float | None = None
    clocks_apart_seconds: float = 0.0
    ready: list[int] = field(default_factory=list)
    most_voluntary: int = 0
    out_of_memory: int = 0

    def __post_init__(self) -> None:
        self._chance = random.Random(35)  # noqa: S311 - a simulation
        self._sidecars: dict[str, tuple[Evictor, Clock, float]] = {}
        places = {pod.uid: place for place, pod in enumerate(self.cluster.pods.values())}
        self._ends = {uid: self.life_seconds + place * self.spread_seconds for uid, place in places.items()}

    def run(self, seconds: float) -> Fleet:
        """Run the fleet for so long."""
        asyncio.run(self._run(seconds))
        return self

    @property
    def evictions(self) -> int:
        return self.cluster.asked.count("create pods/eviction")

    @property
    def least_ready(self) -> int:
        return min(self.ready)

    @property
    def nobody_seconds(self) -> float:
        return STEP_SECONDS * self.ready.count(0)

    def fewer_than(self, other_fleet: Fleet) -> float:
        """Return for how long at a stretch fewer replicas served than in another fleet."""
        pairs = zip(self.ready, other_fleet.ready, strict=True)
        stretches = groupby(mine < theirs for mine, theirs in pairs)
        return STEP_SECONDS * max((len(list(stretch)) for fewer, stretch in stretches if fewer), default=0)

    async def _run(self, seconds: float) -> None:
        for step in range(int(seconds / STEP_SECONDS)):
            now = step * STEP_SECONDS
            self.cluster.advance(now)
            self._age(now)
            self.ready.append(self.cluster.ready)
            if self.restart_seconds and now % self.restart_seconds == 0:
                self._sidecars.clear()
            if self.has_guardrail:
                await asyncio.gather(*(self._turn(pod, now) for pod in list(self.cluster.pods.values())))
            self.most_voluntary = max(self.most_voluntary, self.cluster.voluntary)

    def _age(self, now: float) -> None:
        for pod in self.cluster.pods.values():
            if self.cluster.is_ready(pod) and now >= self._ends.setdefault(pod.uid, pod.ready_at + self.life_seconds):
                self.out_of_memory += 1
                self.cluster.crash(pod.name)
                self._ends[pod.uid] = pod.ready_at + self.life_seconds

    async def _turn(self, pod: Pod, now: float) -> None:
        if pod.uid not in self._sidecars:
            chance = self._chance
            clock = Clock(
                now=now,
                monotonic_offset=chance.uniform(0, 1e6),
                offset=chance.uniform(-1, 1) * self.clocks_apart_seconds,
            )
            policy = EvictionPolicy(is_dry_run=False, near_seconds=self.near_seconds, quiet_hour=None)
            connection = Connection(self.cluster, lambda path: self.fault(clock.now, path))
            new_evictor = Evictor(connection, policy, namespace="llm", name=pod.name, clock=clock)
            self._sidecars[pod.uid] = new_evictor, clock, chance.choice((0.0, STEP_SECONDS))
        evictor, clock, phase = self._sidecars[pod.uid]
        clock.now = now
        if (now + phase) % TURN_SECONDS == 0:
            left_seconds = self._ends.get(pod.uid, pod.ready_at + self.life_seconds) - now
            is_due = self.cluster.is_ready(pod) and left_seconds < min(self.near_seconds, 0.75 * self.life_seconds)
            await evictor.turn("GPU 0 leaks" if is_due else None)
