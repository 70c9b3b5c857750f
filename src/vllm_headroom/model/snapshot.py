"""Everything that one tick saw."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from msgspec import Struct

from vllm_headroom.model.engine import EnginePage, EngineProcess, HostMemory, Life, ProcessName
from vllm_headroom.model.gpu import Failure, Gpu, ProbeReadings, ReadingTime
from vllm_headroom.vocabulary import Level, MetricType


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


class Metric(Struct, frozen=True, kw_only=True):
    """One exported family, a counter's name in `_total`; `needs` are the engine's facts that it is absent without."""

    name: str
    kind: MetricType
    labels: tuple[str, ...]
    help: str
    needs: tuple[str, ...] = ()


class Sample(NamedTuple):
    """One value of a metric; `labels` are the values in the order of `metric.labels`.

    A tick makes hundreds, and reads them through once: a tuple is unpacked at once.
    """

    metric: Metric
    labels: tuple[str, ...]
    value: float


class Published(Struct, frozen=True, kw_only=True):
    """What a scrape sees: the samples of one tick and when that tick ended."""

    samples: tuple[Sample, ...]
    monotonic_seconds: float


class Values:
    """The samples of one tick, by metric and labels."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._families: defaultdict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
        for metric, labels, value in samples:
            self._families[metric.name][labels] = value

    def of(self, metric: Metric) -> dict[tuple[str, ...], float]:
        """Return a metric's values by their labels."""
        return self._families.get(metric.name, {})

    def value(self, metric: Metric, *labels: str) -> float | None:
        """Return one value, None where it is not known."""
        return self.of(metric).get(labels)

    def state(self, metric: Metric, *labels: str) -> str | None:
        """Return the one state that is 1, of a metric whose last label is the state."""
        return next((found[-1] for found, value in self.of(metric).items() if value and found[:-1] == labels), None)


class Verdict(Struct, frozen=True, kw_only=True):
    """One sentence on a GPU, the engine or its host memory; `alert` names the runbook that helps, None without one."""

    subject: str
    level: Level
    sentence: str
    alert: str | None = None


def worst(verdicts: Iterable[Verdict]) -> Level:
    """Return the level of the worst; unknown where there is none."""
    return max((verdict.level for verdict in verdicts), key=tuple(Level).index, default=Level.UNKNOWN)
