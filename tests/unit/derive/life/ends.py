"""Ends whose truth is known: who died when, and what kernel, driver and allocator said, as a sidecar samples it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

from msgspec import Struct

from tests.samples import gpu
from tests.unit.derive.life.watch import CORE, REFUSED, SERVER, SILENT, Watch, process, working
from vllm_headroom.derive.life.causes import judge_ending
from vllm_headroom.model import Diagnosis, Ending, EnginePage, EngineProcess, Failure, Fate, Gpu, HostMemory, Leftover
from vllm_headroom.trace.incident import EngineEvent, Incident, Oom, Xid, add_evidence, find_decisive
from vllm_headroom.units import GIB, MIB
from vllm_headroom.vocabulary import EndCause, Role

NEVER: Final = float("inf")
TOTAL_BYTES: Final = 80 * GIB
WARM_SECONDS: Final = 900.0


class Plan(Struct, kw_only=True):
    """What happens, in seconds since the first event; a process that is not named stays.

    `memory` has the engine's and others' bytes at a time; `stands` is when progress stops, `shuts` when the port
    closes, `kills` when the kernel counts a kill.
    """

    cause: EndCause
    deaths: dict[int, float]
    workers: int = 1
    running: float = 6.0
    stands: float = NEVER
    shuts: float = NEVER
    kills: float = NEVER
    memory: Callable[[float], tuple[int, int]] = lambda _: (70 * GIB, 0)
    xid: int | None = None
    oom: Oom | None = None
    tick: float = 5.0
    page_hangs: bool = False


class Timeline:
    """An engine that follows a plan, sampled by a sidecar."""

    def __init__(self, plan: Plan, rng: Random) -> None:
        self.plan, self.watch, self.events = plan, Watch(processes=(), gpus=()), list[tuple[EngineEvent, Ending]]()
        self._all = (SERVER, CORE, *(process(12 + rank, Role.WORKER) for rank in range(plan.workers)))
        self._phase = rng.uniform(0.0, plan.tick)
        self._done = 100.0

    def play(self) -> Diagnosis:
        """Return what is reported about the end once all is over."""
        at = -WARM_SECONDS
        while at < -60.0:
            self._look(at, 30.0)
            at += 30.0
        last_death = max((seconds for seconds in self.plan.deaths.values() if seconds < NEVER), default=0.0)
        at = -60.0 + self._phase
        while at < max(last_death, min(self.plan.stands, 100.0) + 75.0) + 4 * self.plan.tick:
            self._look(at, self.plan.tick)
            at += self.plan.tick
        decisive = find_decisive([event for event, _ in self.events])
        ending = next(ending for event, ending in self.events if event is decisive)
        xids = () if self.plan.xid is None else (Xid(t=decisive.t, uuid="GPU-a", xid=self.plan.xid),)
        ooms = () if self.plan.oom is None else (self.plan.oom,)
        incident = Incident(t=decisive.t, what=decisive.what, reason=decisive.reason, xids=xids, ooms=ooms)
        return judge_ending(add_evidence(ending, incident))[0]

    def _look(self, at: float, step: float) -> None:
        alive = tuple(
            engine_process for engine_process in self._all if self.plan.deaths.get(engine_process.pid, NEVER) > at
        )
        if at < self.plan.stands and CORE in alive:
            self._done += step
        host = HostMemory(oom_kills=int(at >= self.plan.kills))
        status = self.watch.look(
            self._page(at, alive), processes=alive, gpus=(self._card(at, alive),), host=host, after_seconds=step
        )
        if status.event is not None:
            event = status.event
            self.events.append((EngineEvent(t=event.seconds, what=event.kind, reason=event.reason), event))

    def _page(self, at: float, alive: tuple[EngineProcess, ...]) -> EnginePage | Failure:
        if SERVER not in alive or at >= self.plan.shuts:
            return REFUSED
        if self.plan.page_hangs and at >= self.plan.stands:
            return SILENT
        return working(self._done, running=self.plan.running)

    def _card(self, at: float, alive: tuple[EngineProcess, ...]) -> Gpu:
        """What a process held goes with it: the worker's share, or the core's where there is one card."""
        held_bytes, other_bytes = self.plan.memory(at)
        holders = [engine_process for engine_process in alive if engine_process.role is Role.WORKER]
        held_bytes = held_bytes if holders else 0
        orphans = tuple(
            Leftover(pid=holder.pid, fate=Fate.ORPHANED, used_bytes=held_bytes)
            for holder in holders
            if SERVER not in alive
        )
        gpu_sample = gpu(total=TOTAL_BYTES, used=held_bytes + other_bytes, engine=held_bytes, other=other_bytes)
        return Gpu(
            reading=gpu_sample.reading,
            attribution=gpu_sample.attribution,
            engine_bytes=held_bytes,
            other_bytes=other_bytes,
            held_bytes=held_bytes,
            leftovers=orphans,
        )


def order_deaths(rng: Random, plan_workers: int, first_pids: tuple[int, ...]) -> dict[int, float]:
    """Return when each process dies: these first, the others 0 to 10 s apart in any order."""
    later_pids = [pid for pid in (10, 11, *range(12, 12 + plan_workers)) if pid not in first_pids]
    rng.shuffle(later_pids)
    at, deaths = 0.0, dict.fromkeys(first_pids, 0.0)
    for pid in later_pids:
        at += rng.uniform(0.0, 10.0 / len(later_pids))
        deaths[pid] = at
    return deaths


def kill_by_kernel(rng: Random) -> Plan:
    workers = rng.choice((1, 1, 2, 4))
    victim = rng.choice((10, 11, 12))
    deaths = order_deaths(rng, workers, (victim,))
    return Plan(cause=EndCause.KILLED, deaths=deaths, workers=workers, kills=0.0, running=rng.choice((0.0, 6.0)))


def burst(rng: Random) -> Plan:
    free, lead_seconds = rng.randint(5, 200) * MIB, rng.uniform(0.5, 40.0)

    def memory(at: float) -> tuple[int, int]:
        return (70 * GIB, 0) if at < -lead_seconds else (TOTAL_BYTES - free, 0)

    oom = Oom(uuid="GPU-a", asked=2 * GIB, free=free) if rng.random() < 0.5 else None
    tick = 5.0 if lead_seconds > 5.0 else 1.0 if lead_seconds > 1.0 or oom is None else 5.0
    lead_seconds = max(lead_seconds, tick + 0.5) if oom is None else lead_seconds
    first_pids = rng.choice(((11, 12), (12,), (11,)))
    return Plan(cause=EndCause.BURST, deaths=order_deaths(rng, 1, first_pids), memory=memory, oom=oom, tick=tick)


def leak(rng: Random) -> Plan:
    free = rng.randint(5, 200) * MIB

    def memory(at: float) -> tuple[int, int]:
        share = min(1.0, max(0.0, (at + WARM_SECONDS) / WARM_SECONDS))
        return 60 * GIB + int(share * (20 * GIB - free)), 0

    return Plan(cause=EndCause.LEAK, deaths=order_deaths(rng, 1, rng.choice(((11, 12), (12,)))), memory=memory)


def neighbour(rng: Random) -> Plan:
    free, lead_seconds = rng.randint(5, 200) * MIB, rng.uniform(6.0, 300.0)

    def memory(at: float) -> tuple[int, int]:
        return 70 * GIB, 0 if at < -lead_seconds else 10 * GIB - free

    return Plan(cause=EndCause.NEIGHBOUR, deaths=order_deaths(rng, 1, (11, 12)), memory=memory)


def refused_allocation(rng: Random) -> Plan:
    """torch was refused more than was free: the card was never full."""
    oom = Oom(uuid="GPU-a", asked=20 * GIB, free=10 * GIB)
    return Plan(cause=EndCause.BURST, deaths=order_deaths(rng, 2, rng.choice(((11,), (12, 13)))), workers=2, oom=oom)


def driver_fault(rng: Random) -> Plan:
    workers = rng.choice((1, 2, 8))
    first_pids = rng.choice(((12,), (11,), tuple(range(12, 12 + workers))))
    return Plan(
        cause=EndCause.CRASH,
        deaths=order_deaths(rng, workers, first_pids),
        workers=workers,
        xid=rng.choice((31, 48, 79)),
        running=rng.choice((0.0, 6.0)),
    )


def crash(rng: Random) -> Plan:
    workers = rng.choice((1, 2, 4))
    return Plan(cause=EndCause.CRASH, deaths=order_deaths(rng, workers, (rng.choice((11, 12)),)), workers=workers)


def server_crash(rng: Random) -> Plan:
    """The server goes first and leaves its core behind for a while."""
    deaths = order_deaths(rng, 1, (10,))
    return Plan(cause=EndCause.CRASH, deaths=deaths, running=6.0)


def crash_at_once(rng: Random) -> Plan:
    return Plan(cause=EndCause.CRASH, deaths=dict.fromkeys((10, 11, 12), rng.uniform(0.0, 4.0)))


def hang_and_kill(rng: Random) -> Plan:
    """It stands still, and somebody kills it minutes later; not a process went before."""
    deaths = dict.fromkeys((10, 11, 12), rng.uniform(70.0, 200.0))
    return Plan(cause=EndCause.HANG, deaths=deaths, stands=0.0, page_hangs=rng.random() < 0.3)


def stop(rng: Random) -> Plan:
    """The server closes its port, stops its core, and waits for its clients."""
    core = rng.uniform(0.0, 4.0)
    deaths = {11: core, 12: core + rng.uniform(0.0, 2.0), 10: core + rng.uniform(26.0, 60.0)}
    return Plan(cause=EndCause.STOPPED, deaths=deaths, shuts=0.0)


def stop_idle(rng: Random) -> Plan:
    at = rng.uniform(0.0, 2.0)
    deaths = {10: at, 11: at, 12: at}
    return Plan(cause=EndCause.IDLE, deaths=deaths, shuts=0.0, running=0.0)


KINDS: Final = (
    kill_by_kernel,
    burst,
    leak,
    neighbour,
    refused_allocation,
    driver_fault,
    crash,
    server_crash,
    crash_at_once,
    hang_and_kill,
    stop,
    stop_idle,
)


def play(kind: Callable[[Random], Plan], seed: int) -> tuple[EndCause, Diagnosis]:
    """Return the truth of an end, and what is reported about it."""
    rng = Random(f"{kind.__name__} {seed}")  # noqa: S311 - scenes, not secrets
    plan = kind(rng)
    return plan.cause, Timeline(plan, rng).play()
