"""A Service of four replicas that leak, asked by a kubelet: what gates save, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import cos, pi
from random import Random
from typing import Final

from msgspec.structs import replace

from tests.samples import A_GPU, engine, gpu, page, snapshot
from vllm_headroom import catalog
from vllm_headroom.derive import answer
from vllm_headroom.derive.gates import Gates, Rules, build_gates
from vllm_headroom.model import EngineStatus, Sample, Values
from vllm_headroom.units import GIB
from vllm_headroom.vocabulary import EngineState, GateName, LeakState

STEP: Final = 30.0
"""Three failures of a probe every ten seconds: what a kubelet needs to act."""

HOUR: Final = 3600.0
DAY: Final = 24 * HOUR
MIDNIGHT: Final = 1_760_000_000.0 // DAY * DAY
REPLICAS: Final = 4
REQUEST_SECONDS: Final = 60.0
FREE: Final = 6 * GIB
LEAKED_PER_REQUEST: Final = 20_000.0
LOADS_FOR: Final = 300.0
FOUND_AFTER: Final = 90 * 60.0
"""As long as the detector takes to be sure of such a leak."""

LOWER: Final = 0.7
"""The lower bound of the time that is left, over the time that is."""


@dataclass(slots=True)
class Counts:
    """What became of the requests, and when engines ended."""

    served: float = 0.0
    lost: float = 0.0
    crashes: list[float] = field(default_factory=list)
    restarts: list[float] = field(default_factory=list)
    nobody: float = 0.0


@dataclass(slots=True)
class Replica:
    """An engine with its sidecar."""

    name: str
    free: float
    began: float = 0.0
    up_at: float = 0.0
    running: float = 0.0
    finished: float = 0.0
    rate: float = 0.0
    ending_at: float | None = None
    state: Gates = field(default_factory=Gates)


def arrivals(now: float, noise: Random) -> float:
    """Return the requests per second at a time of the day, most at two in the afternoon."""
    return (12.0 - 9.0 * cos(2 * pi * (now % DAY / HOUR - 2.0) / 24.0)) * noise.uniform(0.8, 1.2)


def watched(replica: Replica, now: float, rules: Rules) -> None:
    """Let the sidecar see one sample."""
    seen = snapshot(
        at=now,
        engines=page(engine(running=replica.running, waiting=0.0, finished_total=replica.finished)),
        gpus=(gpu(),),
    )
    up = now >= replica.up_at
    life = EngineStatus(
        state=EngineState.SERVING if up else EngineState.STARTING, began_seconds=replica.began, in_service=up
    )
    samples: tuple[Sample, ...] = ()
    if up and now - replica.up_at > FOUND_AFTER and replica.rate > 0:
        left = LOWER * replica.free / replica.rate
        leaking = Sample(catalog.LEAK_STATE, (*A_GPU, LeakState.LEAKING), 1.0)
        samples = (leaking, Sample(catalog.TIME_TO_OOM_LOWER, A_GPU, left))
    here = replace(seen, time_seconds=MIDNIGHT + now, life=life)
    replica.state, _ = answer(build_gates(rules, Values(samples)), replica.state, here)


def begun_anew(replica: Replica, now: float) -> None:
    replica.began, replica.up_at, replica.ending_at = now, now + LOADS_FOR, None
    replica.free, replica.running, replica.rate = FREE, 0.0, 0.0


def served(replica: Replica, now: float, share: float, counts: Counts) -> None:
    """Let requests come and go for one step; out of memory, those that run are lost."""
    done = replica.running * STEP / (REQUEST_SECONDS + STEP)
    replica.running += share * STEP - done
    replica.finished += done
    counts.served += done
    leaked = done * LEAKED_PER_REQUEST
    replica.rate += 0.01 * (leaked / STEP - replica.rate)
    replica.free -= leaked
    if replica.free <= 0:
        counts.lost += replica.running
        counts.crashes.append(now)
        begun_anew(replica, now)


def fleet(*, ready_seconds: float | None, live_seconds: float | None, days: int = 4, seed: int = 1) -> Counts:
    """Return what became of the requests over some days; the engines began at different times."""
    noise, counts = Random(seed), Counts()  # noqa: S311 - a simulation
    replicas = [Replica(f"vllm-{each}", FREE * noise.uniform(0.4, 1.0)) for each in range(REPLICAS)]
    now = 0.0
    while now < days * DAY:
        alive = [each for each in replicas if now >= each.up_at]
        ready = [each for each in alive if each.state.reason(GateName.READY) is None]
        load = arrivals(now, noise)
        counts.nobody += 0.0 if ready else load * STEP
        for each in replicas:
            rules = Rules(
                ready_seconds=ready_seconds, ready_most_seconds=900.0, live_seconds=live_seconds, name=each.name
            )
            watched(each, now, rules)
            if now >= each.up_at:
                served(each, now, load / len(ready) if each in ready else 0.0, counts)
            if each.ending_at is None and now >= each.up_at and each.state.reason(GateName.LIVE) is not None:
                each.ending_at = now + 3 * REQUEST_SECONDS
            if each.ending_at is not None and now >= each.ending_at:
                counts.restarts.append(now)
                counts.lost += each.running
                begun_anew(each, now)
        now += STEP
    return counts
