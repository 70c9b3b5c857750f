"""An engine looked at every five seconds, and what is known of its run after each look."""

from __future__ import annotations

from typing import Any, Final

from msgspec.structs import replace

from tests.samples import engine, gpu, page, snapshot
from vllm_headroom.derive.life.engine import EngineMemory, update_engine
from vllm_headroom.model import (
    EnginePage,
    EngineProcess,
    EngineStatus,
    Failure,
    Gpu,
    HostMemory,
    LogReading,
    ProbeReadings,
    ServerReply,
    Snapshot,
)
from vllm_headroom.vocabulary import EngineState, ExitReason, Reason, Role, Source

GIB: Final = 2**30
STEP_SECONDS: Final = 5.0
BEGAN: Final = 1_760_000_000.0

REFUSED: Final = Failure(source=Source.ENGINE, reason=Reason.UNREACHABLE, message="refused")
SILENT: Final = Failure(source=Source.ENGINE, reason=Reason.TIMEOUT, message="no answer")
LOGIN: Final = Failure(source=Source.ENGINE, reason=Reason.UNAUTHORIZED, message="401")
UNSEEN: Final = Failure(source=Source.PROCESS, reason=Reason.UNAVAILABLE, message="hidden")
NO_GPU: Final = Failure(source=Source.NVML, reason=Reason.LIBRARY_MISSING, message="none")


def process(pid: int, role: Role, started: float = BEGAN) -> EngineProcess:
    return EngineProcess(pid=pid, role=role, rss_bytes=GIB, started_at_seconds=started)


SERVER: Final = process(10, Role.API_SERVER)
CORE: Final = process(11, Role.ENGINE_CORE)
WORKER: Final = process(12, Role.WORKER)
WHOLE: Final = (SERVER, CORE, WORKER)
NEXT: Final = tuple(
    replace(engine_process, pid=engine_process.pid + 10, started_at_seconds=BEGAN + 9000) for engine_process in WHOLE
)


def card(held_gib: float, *, peak_gib: float | None = None, uuid: str = "GPU-a") -> Gpu:
    """Return an 80 GiB device on which the engine holds all that is used."""
    peak = None if peak_gib is None else int(peak_gib * GIB)
    return gpu(uuid=uuid, total=80 * GIB, used=int(held_gib * GIB), used_peak_bytes=peak)


def working(done: float, *, running: float = 4.0, started: float | None = BEGAN, **engine_fields: Any) -> EnginePage:
    """Return the page of an engine that has finished so many requests."""
    facts = {"waiting": 0.0, "kv_used_ratio": 0.5, "started_at_seconds": started, **engine_fields}
    return page(engine(running=running, finished_total=done, generation_tokens_total=done * 9, **facts))


class Watch:
    """Follows a run; what is not said at a look is as at the one before."""

    def __init__(
        self,
        *,
        processes: tuple[EngineProcess, ...] | Failure = WHOLE,
        gpus: tuple[Gpu, ...] | Failure | None = None,
        host: HostMemory | None = None,
    ) -> None:
        self.state = EngineMemory()
        self.at = 0.0
        self.seen: Snapshot | None = None
        self._processes = processes
        self._gpus: tuple[Gpu, ...] | Failure = (card(70),) if gpus is None else gpus
        self._host = host

    def look(
        self,
        engines: EnginePage | Failure,
        *,
        processes: tuple[EngineProcess, ...] | Failure | None = None,
        gpus: tuple[Gpu, ...] | Failure | None = None,
        probe: ProbeReadings | None = None,
        host: HostMemory | None = None,
        after_seconds: float = STEP_SECONDS,
        owed_since: float | None = None,
        neighbours: tuple[EngineProcess, ...] = (),
        ambiguous: int = 0,
        server: ServerReply | None = None,
        log: LogReading | Failure | None = None,
    ) -> EngineStatus:
        """Look `after` so many seconds, and return what is known then; a canary has waited since `owed_since`."""
        self.at += after_seconds
        self._processes = self._processes if processes is None else processes
        self._gpus = self._gpus if gpus is None else gpus
        self._host = self._host if host is None else host
        now = snapshot(
            at=self.at, engines=engines, gpus=self._gpus, processes=self._processes, probe=probe, host=self._host
        )
        neighbour_keys = frozenset((neighbour.pid, neighbour.started_at_seconds) for neighbour in neighbours)
        now = replace(now, unanswered_since_seconds=owed_since, neighbours=neighbour_keys, ambiguous_engines=ambiguous)
        now = replace(
            now, log=log, server=server, has_silent_core=isinstance(probe, ProbeReadings) and probe.has_silent_core
        )
        self.state, self.seen = update_engine(self.state, now)
        assert self.seen.engine_status is not None
        return self.seen.engine_status

    def state_of(self, engines: EnginePage | Failure, **look_fields: Any) -> EngineState:
        return self.look(engines, **look_fields).state


def serving(**look_fields: Any) -> Watch:
    """Return a watch over an engine that has worked."""
    watch = Watch(**look_fields)
    assert watch.state_of(working(10)) is EngineState.SERVING
    assert watch.look(working(20)).is_in_service
    return watch


def exits(status: EngineStatus) -> dict[ExitReason, int]:
    """Return how often the engine exited for each reason that occurred."""
    return {reason: count for reason, count in status.exits if count}
