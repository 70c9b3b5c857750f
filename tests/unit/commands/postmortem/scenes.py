"""Made-up incidents whose cause is known: what a sidecar would have sampled before and after an end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from vllm_headroom.vocabulary import EndCause

GIB: Final = 2**30
MIB: Final = 2**20
TOTAL: Final = 80 * GIB
RESERVED: Final = 600 * MIB
BEGAN: Final = 1_760_000_000.0
Record = dict[str, Any]


@dataclass
class Scene:
    """An incident: its samples, its truth, and the header that the daemon would have given it, or none."""

    cause: EndCause
    samples: list[Record] = field(default_factory=list)
    header: Record | None = None


class Engine:
    """An engine that is looked at; how well it is seen differs from scene to scene."""

    def __init__(self, rng: Random, *, quiet_seconds: float | None = None) -> None:
        self.rng, self.now = rng, BEGAN
        self.samples: list[Record] = []
        self.held = int(rng.uniform(69, 75) * GIB)
        self.other, self.peak = 0, 0
        self.oom_kills, self.is_killed = 0, False
        self.running = float(rng.randint(4, 60))
        self.finished, self.started = 1000.0, BEGAN - 4000
        self.roles: tuple[str, ...] = ("api_server", "engine_core", "worker")
        self.has_page = True
        self.attributed = rng.random() < 0.85
        self.sees_processes = rng.random() < 0.75
        self.fails = 0.01 if rng.random() < 0.5 else 0.0
        self.quiet(rng.uniform(700, 1500) if quiet_seconds is None else quiet_seconds)

    @property
    def room(self) -> int:
        return TOTAL - RESERVED - self.held - self.other

    def quiet(self, seconds: float, step: float = 15.0) -> None:
        """Serve for so long, as ever."""
        ends = self.now + seconds
        while self.now < ends:
            self.serve(step)

    def serve(self, step: float = 5.0, *, moves: bool = True) -> None:
        if moves and self.running:
            self.running = max(1.0, self.running + self.rng.choice((-2, -1, 0, 0, 1, 2)))
        self.finished += step * self.running / 8 if moves else 0.0
        self.held += self.rng.choice((2, 20)) * MIB if moves and self.room > GIB and self.rng.random() < 0.05 else 0
        self.look(step)

    def look(self, step: float = 5.0) -> None:
        """Sample after `step` seconds."""
        self.now += step
        used = self.held + self.other
        gpu = {"gpu": 0, "uuid": "GPU-a", "total": TOTAL, "used": used, "reserved": RESERVED}
        gpu |= {"used_peak": max(used, self.peak), "processes": 2 if self.other else 1}
        gpu |= {"engine": self.held, "other": self.other} if self.attributed else {}
        engine = {"model_name": "m", "engine": "0", "running": self.running, "waiting": 0, "kv_used_ratio": 0.4}
        engine |= {"finished_total": self.finished, "generation_tokens_total": 90 * self.finished, "awake": True}
        engine |= {"started_at": self.started}
        processes = [{"role": role, "rss": 2 * GIB, "started_at": self.started} for role in self.roles]
        failed = self.rng.random() < self.fails
        self.samples.append(
            {
                "t": round(self.now, 3),
                "gpus": [gpu],
                "engines": [engine] if self.has_page and not failed else None,
                "processes": processes if self.sees_processes else None,
                "host": {"used": 20 * GIB, "limit": 64 * GIB, "oom_kills": self.oom_kills},
            }
        )

    def end(self) -> None:
        """Be gone at once, with all that it held."""
        self.has_page, self.roles, self.held, self.peak = False, (), 0, 0
        self.oom_kills += int(self.is_killed)

    def afterwards(self) -> None:
        """Stay away, and perhaps come back."""
        self.end()
        for _ in range(self.rng.randint(1, 8)):
            self.look()
        if self.rng.random() < 0.5:
            self.begin()
            self.has_page, self.held = True, 70 * GIB
            self.running, self.finished = 3.0, 0.0
            for _ in range(3):
                self.serve()

    def begin(self) -> None:
        self.roles, self.started = ("api_server", "engine_core", "worker"), self.now


def leak(rng: Random) -> Iterator[Engine]:
    engine = Engine(rng, quiet_seconds=30)
    steps = rng.randint(60, 160)
    lost = engine.room - rng.randint(10, 120) * MIB
    for _ in range(steps):
        engine.held += lost // steps
        engine.serve(rng.choice((15.0, 30.0)) if rng.random() < 0.1 else 15.0)
    yield engine


def burst(rng: Random) -> Iterator[Engine]:
    engine = Engine(rng)
    left_bytes = rng.randint(0, 150) * MIB
    looks = rng.randint(1, 12)
    lost = engine.room - left_bytes
    if rng.random() < 0.4:
        engine.peak = engine.held + lost
        engine.serve()
    else:
        for _ in range(looks):
            engine.held += lost // looks
            engine.running += rng.randint(0, 8)
            engine.serve()
    yield engine


def failed_allocation(rng: Random) -> Iterator[Engine]:
    """What is requested and not had shows nowhere: only that little was left."""
    engine = Engine(rng)
    engine.held += engine.room - rng.randint(300, 950) * MIB
    engine.quiet(300, 5.0)
    yield engine


def young_burst(rng: Random) -> Iterator[Engine]:
    """An engine that has served for minutes only."""
    engine = Engine(rng, quiet_seconds=rng.uniform(60, 240))
    engine.held += engine.room - rng.randint(10, 150) * MIB
    engine.serve()
    yield engine


def neighbour(rng: Random) -> Iterator[Engine]:
    engine = Engine(rng)
    lost = engine.room - rng.randint(0, 150) * MIB
    looks = rng.randint(1, 100)
    for _ in range(looks):
        engine.other += lost // looks
        engine.serve()
    yield engine


def hasty_neighbour(rng: Random) -> Iterator[Engine]:
    """One that comes between two samples: only the peak shows what it took, and not who."""
    engine = Engine(rng)
    engine.peak = engine.held + engine.room - rng.randint(0, 150) * MIB
    engine.serve()
    yield engine


def killed(rng: Random) -> Iterator[Engine]:
    engine = Engine(rng)
    engine.is_killed = True
    yield engine


def never_fitted(rng: Random) -> Iterator[Engine]:
    engine = Engine(rng, quiet_seconds=60)
    engine.end()
    kind = rng.randint(0, 2)
    engine.other = int(rng.uniform(5, 40) * GIB) if kind == 0 else 0
    for _ in range(rng.randint(3, 10)):
        engine.look()
    engine.begin()
    limit_bytes = engine.room - (rng.randint(20, 150) * MIB if kind == 1 else int(rng.uniform(0.3, 4) * GIB))
    looks = rng.randint(6, 30)
    for _ in range(looks):
        engine.held += limit_bytes // looks
        engine.look()
    yield engine


def hang(rng: Random) -> Iterator[Engine]:
    engine = Engine(rng)
    for _ in range(rng.randint(14, 40)):
        engine.serve(moves=False)
    yield engine


def silent_hang(rng: Random) -> Iterator[Engine]:
    engine = Engine(rng)
    engine.sees_processes, engine.has_page = True, False
    for _ in range(rng.randint(14, 40)):
        engine.look()
    yield engine


def crash(rng: Random) -> Iterator[Engine]:
    engine = Engine(rng)
    if rng.random() < 0.05:  # a crash of an idle engine: nothing can tell
        engine.running = 0.0
        for _ in range(8):
            engine.serve()
    if engine.sees_processes and rng.random() < 0.4:
        engine.roles = ("api_server",)
        for _ in range(rng.randint(1, 5)):
            engine.serve(moves=False)
    yield engine


def idle(rng: Random) -> Iterator[Engine]:
    engine = Engine(rng)
    engine.running = 0.0
    for _ in range(rng.randint(2, 30)):
        engine.serve()
    engine.has_page = rng.random() < 0.5
    engine.look()
    yield engine


ALL: Final[dict[Callable[[Random], Iterator[Engine]], EndCause]] = {
    leak: EndCause.LEAK,
    burst: EndCause.BURST,
    failed_allocation: EndCause.BURST,
    young_burst: EndCause.BURST,
    neighbour: EndCause.NEIGHBOUR,
    killed: EndCause.KILLED,
    never_fitted: EndCause.NEVER_FITTED,
    hang: EndCause.HANG,
    silent_hang: EndCause.HANG,
    crash: EndCause.CRASH,
    idle: EndCause.IDLE,
}


def scene(make: Callable[[Random], Iterator[Engine]], seed: int) -> Scene:
    """Return an incident; every second one has the header of the daemon that saw it."""
    rng = Random(f"{make.__name__} {seed}")  # noqa: S311 - scenes, not secrets
    engine = next(make(rng))
    ends = engine.now + 5
    engine.afterwards()
    header: Record | None = None
    if seed % 2:
        reason = "oom_killed" if make is killed else "gone"
        header = {"t": ends, "what": "ended", "reason": reason}
        if make is leak:
            header["before"] = {"leaks": [{"uuid": "GPU-a", "state": "leaking"}]}
    return Scene(cause=ALL.get(make, EndCause.NEIGHBOUR), samples=engine.samples, header=header)
