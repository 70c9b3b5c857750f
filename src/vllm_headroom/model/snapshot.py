"""The data of one tick."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from msgspec import Struct

from vllm_headroom.model.engine import (
    EnginePage,
    EngineProcess,
    HostMemory,
    Pool,
    ProcessName,
    ServerReply,
)
from vllm_headroom.model.gpu import Failure, Gpu, ProbeReadings, ReadingTime
from vllm_headroom.model.start import LogReading
from vllm_headroom.model.status import EngineStatus
from vllm_headroom.vocabulary import Level, MetricType, Reason, Situation, Source

MUTE_PROBE: Final = Failure(
    source=Source.PROBE,
    reason=Reason.NOT_FOUND,
    message="no running process of vLLM writes a probe's file: those that did have exited, or their"
    " probe has stopped",
)
"""The failure of the probe if its folder contains no file from a running process."""


TokenBytes = Callable[[str, int | None], int | None]
"""Takes the KV cache's dtype and the number of the engine's GPUs (None if unknown). Returns the
bytes that one token takes across all these GPUs, or None if unknown.

If layers of several kinds share the cache's blocks, nothing can be converted to tokens. For these
models, the function returns NO_TOKEN_BYTES for any dtype.
"""

NO_TOKEN_BYTES: Final = 0


class Snapshot(Struct, frozen=True, kw_only=True):
    """Everything that was read in one tick.

    Apart from its own state, a derivation has no other input.
    """

    time_seconds: float
    """When the snapshot was read, in seconds since the epoch; used for display."""

    monotonic_seconds: float
    """When the snapshot was read, on the monotonic clock; used for arithmetic."""

    engines: EnginePage | Failure
    gpus: tuple[Gpu, ...] | Failure
    processes: tuple[EngineProcess, ...] | Failure
    probe: ProbeReadings | Failure | None = None
    """The probe's files, or None if no probe folder is configured."""

    log: LogReading | Failure | None = None
    """What the engine's log reports, or None if no log is configured."""

    reading_times: tuple[ReadingTime, ...] = ()
    unanswered_since_seconds: float | None = None
    """When the daemon sent the first unanswered request, on the monotonic clock. The value is None
    while the engine responds or no request is needed.
    """

    server: ServerReply | None = None
    """The answers of the engine's other pages, or None while they are not requested."""

    engine_status: EngineStatus | None = None
    """The status of the engine, or None if unknown, as after an error. While it is unknown, no
    evidence is collected.
    """

    neighbours: frozenset[ProcessName] = frozenset()
    """The root processes of other engines."""

    ambiguous_engines: int = 0
    """The number of visible engines if the watched one is unknown, otherwise 0."""

    left_behind: frozenset[int] = frozenset()
    """The pids of processes whose engine has exited."""

    host: HostMemory | None = None
    """The host memory, or None if unknown."""

    has_silent_core: bool = False
    """Whether an engine core's probe is silent while another writes, as in ProbeReadings. This is a
    separate field, because traces have no probe readings.
    """

    pools: tuple[Pool, ...] = ()
    """The memory pools that vLLM is configured to fill."""

    token_bytes: TokenBytes | None = None
    """Computes the bytes per token of the engine's model, or None if unknown."""

    @property
    def page(self) -> EnginePage | None:
        """Return the engine's page, or None if it could not be read."""
        return None if isinstance(self.engines, Failure) else self.engines

    @property
    def is_in_service(self) -> bool:
        """Return whether the engine is known to have done work in its current run."""
        return self.engine_status is not None and bool(self.engine_status.is_in_service)

    @property
    def devices(self) -> tuple[Gpu, ...]:
        """Return all visible GPUs, or an empty tuple if they could not be read."""
        return () if isinstance(self.gpus, Failure) else self.gpus

    @property
    def engine_processes(self) -> tuple[EngineProcess, ...]:
        """Return the engine's processes, or an empty tuple if they could not be read."""
        return () if isinstance(self.processes, Failure) else self.processes

    @property
    def owned_gpus(self) -> tuple[Gpu, ...]:
        """Return the engine's GPUs, or an empty tuple if they could not be read."""
        return tuple(gpu for gpu in self.devices if gpu.attribution is not None)

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Return the failures of unreadable sources and of a silent probe."""
        probe = self.probe
        if isinstance(probe, ProbeReadings) and not probe.present:
            probe = MUTE_PROBE
        sources = (self.engines, self.gpus, self.processes, probe, self.log)
        return tuple(source for source in sources if isinstance(source, Failure))


class Metric(Struct, frozen=True, kw_only=True):
    """One exported metric family."""

    name: str
    """The full name of the family. The name of a counter ends in `_total`."""

    kind: MetricType
    labels: tuple[str, ...]
    help: str
    needs: tuple[str, ...] = ()
    """The fields of EngineReading that must be present for the metric to be exported."""


class Sample(NamedTuple):
    """One value of a metric. A tuple is cheap to create, and each tick creates hundreds."""

    metric: Metric
    labels: tuple[str, ...]
    """The values of `metric.labels`, in the same order."""

    value: float


class Published(Struct, frozen=True, kw_only=True):
    """The data that a scrape exports."""

    samples: tuple[Sample, ...]
    """All samples of the newest tick."""

    monotonic_seconds: float
    """When the sources were read for that tick, on the monotonic clock."""


class Values:
    """The samples of one tick, by metric and labels."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._families: defaultdict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
        self.add(samples)

    def add(self, samples: Iterable[Sample]) -> None:
        """Add further samples from the same tick."""
        for metric, labels, value in samples:
            self._families[metric.name][labels] = value

    def find_all(self, metric: Metric) -> dict[tuple[str, ...], float]:
        """Return a metric's values, keyed by their labels, or {} if the metric has none."""
        return self._families.get(metric.name, {})

    def value(self, metric: Metric, *labels: str) -> float | None:
        """Return the value of the series with these labels, or None if there is none."""
        return self.find_all(metric).get(labels)

    def state(self, metric: Metric, *labels: str) -> str | None:
        """Return the current state of a metric that has one series per state.

        The last label is the state, and `labels` are the labels before it. The current state's
        series is 1, and the others are 0. Returns None if all series are 0.
        """
        for series, value in self.find_all(metric).items():
            *series_labels, state = series
            if value and tuple(series_labels) == labels:
                return state
        return None


class Verdict(Struct, frozen=True, kw_only=True):
    """The severity level of a subject, such as a GPU, and the reason."""

    subject: str
    """The name of what is judged, such as "GPU 0", "engine" or "sidecar"."""
    level: Level
    sentence: str
    alert: str | None = None
    """The alert that fires, or None if no alert fires. Its runbook has the same name."""

    situation: Situation = Situation.HEALTHY


NO_VERDICT: Final = Verdict(
    subject="sidecar",
    level=Level.UNKNOWN,
    sentence="No sample has been published yet.",
    situation=Situation.BLIND,
)


def find_worst_level(verdicts: Iterable[Verdict]) -> Level:
    """Return the worst level of the verdicts, or UNKNOWN if there are none."""
    levels = [verdict.level for verdict in verdicts]
    return max(levels, key=tuple(Level).index, default=Level.UNKNOWN)
