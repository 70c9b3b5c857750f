"""Everything that one tick saw."""

from __future__ import annotations

from msgspec import Struct

from vllm_headroom.model.engine import EnginePage, EngineProcess, Life, ProcessName
from vllm_headroom.model.gpu import Gpu
from vllm_headroom.model.host import HostMemory
from vllm_headroom.model.inside import ProbeReadings
from vllm_headroom.model.reading import Failure, ReadingTime


class Snapshot(Struct, frozen=True, kw_only=True):
    """Everything one tick saw: the only input of a derivation besides its own state.

    `time_seconds` is seconds since the epoch, for showing; `monotonic_seconds` is for arithmetic. `probe` is None where
    no folder is configured, `host` where nothing is known of the host's memory.
    `unanswered_since_seconds` is since when, on that clock, the engine owes an answer to a request of the daemon's own.
    `neighbours` are the first processes of the engines in sight that were not taken for the one that is watched;
    `ambiguous` is how many there are where any of them may be it. `left_behind` are the pids of what serves none now.
    `life` is None where it is not known, as when following it failed: then nothing is gathered for a verdict.
    """

    time_seconds: float
    monotonic_seconds: float
    engines: EnginePage | Failure
    gpus: tuple[Gpu, ...] | Failure
    processes: tuple[EngineProcess, ...] | Failure
    probe: ProbeReadings | Failure | None = None
    reading_times: tuple[ReadingTime, ...] = ()
    unanswered_since_seconds: float | None = None
    life: Life | None = None
    neighbours: frozenset[ProcessName] = frozenset()
    ambiguous: int = 0
    left_behind: frozenset[int] = frozenset()
    host: HostMemory | None = None

    @property
    def page(self) -> EnginePage | None:
        """The engine's page, None where it could not be read."""
        return None if isinstance(self.engines, Failure) else self.engines

    @property
    def in_service(self) -> bool:
        """Whether what is seen is known to belong to a life of the engine that has worked and goes on."""
        return self.life is not None and bool(self.life.in_service)

    @property
    def devices(self) -> tuple[Gpu, ...]:
        """The GPUs, none where they could not be read."""
        return () if isinstance(self.gpus, Failure) else self.gpus

    @property
    def owned(self) -> tuple[Gpu, ...]:
        """The GPUs that are the engine's."""
        return tuple(gpu for gpu in self.devices if gpu.attribution is not None)

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Why sources could not be read, of those that could not."""
        parts = (self.engines, self.gpus, self.processes, self.probe)
        return tuple(part for part in parts if isinstance(part, Failure))
