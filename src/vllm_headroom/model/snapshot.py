"""The data of one tick."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from msgspec import Struct

from vllm_headroom.model.engine import EnginePage, EngineProcess, HostMemory, Pool, ProcessName
from vllm_headroom.model.gpu import Failure, Gpu, ProbeReadings, ReadingTime
from vllm_headroom.model.status import EngineStatus
from vllm_headroom.vocabulary import Level, MetricType, Reason, Situation, Source

MUTE_PROBE: Final = Failure(
    source=Source.PROBE,
    reason=Reason.NOT_FOUND,
    message="no running process of vLLM writes a probe's file: those that did have exited, or their probe has stopped",
)


TokenBytes = Callable[[str, int | None], int | None]
"""From the KV cache's dtype and the engine's GPUs to the bytes that a token takes on all of them; None if not known."""


class Snapshot(Struct, frozen=True, kw_only=True):
    """Everything one tick read: the only input of a derivation besides its own state.

    `time_seconds` is seconds since the epoch, for display; `monotonic_seconds` is for arithmetic. `probe` is None
    without a folder, `host` where the host's memory is unknown. `unanswered_since_seconds` is since when, on the
    monotonic clock, the engine has not answered a request of the daemon. `neighbours` are the first processes of other
    engines; `ambiguous` is the number of engines if the watched one could not be identified. `left_behind` are the pids
    that serve no engine. `engine_status` is None if unknown, as after an error: then no evidence is collected. `has_silent_core`
    is as in ProbeReadings, which a trace does not have. `pools` are those that vLLM was configured to fill.
    `token_bytes` is of the model that the engine's processes load; None where it is not visible.
    """

    time_seconds: float
    monotonic_seconds: float
    engines: EnginePage | Failure
    gpus: tuple[Gpu, ...] | Failure
    processes: tuple[EngineProcess, ...] | Failure
    probe: ProbeReadings | Failure | None = None
    reading_times: tuple[ReadingTime, ...] = ()
    unanswered_since_seconds: float | None = None
    engine_status: EngineStatus | None = None
    neighbours: frozenset[ProcessName] = frozenset()
    ambiguous: int = 0
    left_behind: frozenset[int] = frozenset()
    host: HostMemory | None = None
    has_silent_core: bool = False
    pools: tuple[Pool, ...] = ()
    token_bytes: TokenBytes | None = None

    @property
    def page(self) -> EnginePage | None:
        """The engine's page, None where it could not be read."""
        return None if isinstance(self.engines, Failure) else self.engines

    @property
    def in_service(self) -> bool:
        """Whether the engine is known to be in a run that has worked and still runs."""
        return self.engine_status is not None and bool(self.engine_status.in_service)

    @property
    def devices(self) -> tuple[Gpu, ...]:
        """The GPUs, none where they could not be read."""
        return () if isinstance(self.gpus, Failure) else self.gpus

    @property
    def engine_processes(self) -> tuple[EngineProcess, ...]:
        """The engine's processes, none where they could not be read."""
        return () if isinstance(self.processes, Failure) else self.processes

    @property
    def owned_gpus(self) -> tuple[Gpu, ...]:
        """The engine's GPUs."""
        return tuple(gpu for gpu in self.devices if gpu.attribution is not None)

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The failures of the sources that could not be read; a probe that no running process has is one."""
        is_mute = isinstance(self.probe, ProbeReadings) and not self.probe.present
        parts = (self.engines, self.gpus, self.processes, MUTE_PROBE if is_mute else self.probe)
        return tuple(part for part in parts if isinstance(part, Failure))


class Metric(Struct, frozen=True, kw_only=True):
    """One exported family, a counter's name in `_total`; absent without the engine's facts in `needs`."""

    name: str
    kind: MetricType
    labels: tuple[str, ...]
    help: str
    needs: tuple[str, ...] = ()


class Sample(NamedTuple):
    """One value of a metric, with labels as in `metric.labels`; a tuple, since a tick makes and unpacks hundreds."""

    metric: Metric
    labels: tuple[str, ...]
    value: float


class Published(Struct, frozen=True, kw_only=True):
    """The data of a scrape: the samples of one tick and when that tick ended."""

    samples: tuple[Sample, ...]
    monotonic_seconds: float


class Values:
    """The samples of one tick, by metric and labels."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._families: defaultdict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
        self.add(samples)

    def add(self, samples: Iterable[Sample]) -> None:
        """Add later samples of the same tick."""
        for metric, labels, value in samples:
            self._families[metric.name][labels] = value

    def find_all(self, metric: Metric) -> dict[tuple[str, ...], float]:
        """Return a metric's values by their labels."""
        return self._families.get(metric.name, {})

    def value(self, metric: Metric, *labels: str) -> float | None:
        """Return one value, None where unknown."""
        return self.find_all(metric).get(labels)

    def state(self, metric: Metric, *labels: str) -> str | None:
        """Return the one state that is 1, of a metric whose last label is the state."""
        return next(
            (
                found[-1]
                for found, value in self.find_all(metric).items()
                if value and found[:-1] == labels
            ),
            None,
        )


class Verdict(Struct, frozen=True, kw_only=True):
    """One sentence on a GPU, the engine or its host memory; `alert` names its runbook, None without one."""

    subject: str
    level: Level
    sentence: str
    alert: str | None = None
    situation: Situation = Situation.HEALTHY


NO_VERDICT: Final = Verdict(
    subject="sidecar",
    level=Level.UNKNOWN,
    sentence="No sample has been published yet.",
    situation=Situation.BLIND,
)


def find_worst(verdicts: Iterable[Verdict]) -> Level:
    """Return the worst level; unknown without verdicts."""
    return max(
        (verdict.level for verdict in verdicts), key=tuple(Level).index, default=Level.UNKNOWN
    )
