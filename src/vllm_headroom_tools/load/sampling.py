"""Sample the engine, the GPUs and the processes while a load is running."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from operator import add
from pathlib import Path
from typing import Final

from msgspec import Struct

from vllm_headroom import catalog
from vllm_headroom.daemon.engine_watch import Sampler
from vllm_headroom.daemon.loop import run_every
from vllm_headroom.daemon.parts import GPU_TIMEOUT_SECONDS, Parts
from vllm_headroom.daemon.sources import close_all
from vllm_headroom.derive.attribution import Selection
from vllm_headroom.derive.series import label_gpu
from vllm_headroom.derive.tick import LEAK, TickRules, build_derivations
from vllm_headroom.model import EnginePage, Failure, Metric, Sample, Snapshot
from vllm_headroom.parse.engines import parse_engines
from vllm_headroom.trace.entries import HEADER, encode_line
from vllm_headroom.trace.recorder import Recorder
from vllm_headroom.vocabulary import Reason, Source
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.history import Histogram, LeakReplay

SeriesLabels = tuple[str, ...]
"""The index and UUID of a GPU, or the role of processes on the host."""

COMBINED: Final[dict[Metric, Callable[[float, float], float]]] = {
    catalog.ENGINE_RUNNING: add,
    catalog.ENGINE_WAITING: add,
    catalog.ENGINE_PREEMPTIONS: add,
    catalog.ENGINE_FINISHED: add,
    catalog.ENGINE_KV_USED: max,
}
"""How the figures of several engines are combined: as their sum or as their maximum."""


class SeriesSummary(Struct):
    """The first, latest and highest values of a figure over time."""

    start: float
    newest: float
    highest: float
    has_fallen: bool = False
    """Whether a value was ever below the previous one. If so, a counter was reset."""


class SeriesSummaries(dict[SeriesLabels, SeriesSummary]):
    """The summaries of a figure, one for each series."""

    def add(self, labels: SeriesLabels, value: float | None) -> None:
        """Add the next value of a series; ignore an unknown value (None)."""
        if value is None:
            return
        summary = self.setdefault(labels, SeriesSummary(value, value, value))
        if value < summary.newest:
            summary.has_fallen = True
        summary.newest = value
        summary.highest = max(summary.highest, value)


class LoadObservation:
    """Collects the samples of a step, or of the whole load.

    Series that no sample contained are absent.
    """

    def __init__(self) -> None:
        self.samples = 0
        # The number of failed samples and the latest failure of each source.
        self.failures: dict[Source, tuple[int, Failure]] = {}
        self.first_snapshot: Snapshot | None = None
        self.newest_snapshot: Snapshot | None = None
        self.gpu_bytes = SeriesSummaries()  # The memory held on each GPU.
        self.host_bytes = SeriesSummaries()  # The resident memory of each role.
        self._engine_figures = SeriesSummaries()
        self._bytes_per_request: defaultdict[SeriesLabels, Histogram] = defaultdict(Histogram)

    def add(self, snapshot: Snapshot, samples: Iterable[Sample]) -> None:
        """Add one sample: the snapshot that was read and the figures derived from it."""
        self.samples += 1
        self.first_snapshot = self.first_snapshot or snapshot
        self.newest_snapshot = snapshot
        for failure in snapshot.failures:
            # Keep the latest message of a source. The first one may be from the server's startup.
            count, _ = self.failures.get(failure.source, (0, failure))
            self.failures[failure.source] = (count + 1, failure)
        for gpu in snapshot.devices:
            self.gpu_bytes.add(label_gpu(gpu), gpu.held_bytes)
        engine_figures: defaultdict[str, float] = defaultdict(float)
        for sample in samples:
            name = sample.metric.name
            if sample.metric is catalog.MEMORY_PER_RUNNING_REQUEST:
                self._bytes_per_request[sample.labels].add(sample.value)
            elif sample.metric is catalog.HOST_MEMORY:
                self.host_bytes.add(sample.labels, sample.value)
            elif sample.metric in COMBINED:
                combine = COMBINED[sample.metric]
                engine_figures[name] = combine(engine_figures[name], sample.value)
        for name, value in engine_figures.items():
            self._engine_figures.add((name,), value)

    def find_engine_figure(self, metric: Metric) -> SeriesSummary | None:
        """Return the summary of an engine figure, or None if no sample had it."""
        return self._engine_figures.get((metric.name,))

    def count_growth(self, metric: Metric) -> float | None:
        """Return by how much one of the engine's counters increased over the samples.

        Returns None if the counter was not exported, or was reset.
        """
        summary = self.find_engine_figure(metric)
        if summary is None or summary.has_fallen:
            return None
        return summary.newest - summary.start

    @property
    def seconds(self) -> float:
        """Return the time from the first sample to the latest, or 0 without samples."""
        if self.first_snapshot is None or self.newest_snapshot is None:
            return 0.0
        return self.newest_snapshot.monotonic_seconds - self.first_snapshot.monotonic_seconds

    @property
    def engine_end(self) -> str | None:
        """Return how the engine ended during the load: whether it disappeared or was restarted.

        Returns None in these cases:

        - The engine is still running.
        - The first page was not read.
        - The latest page failed for a reason other than a refused connection.
        """
        if self.first_snapshot is None or self.newest_snapshot is None:
            return None
        first_page = self.first_snapshot.engines
        newest_page = self.newest_snapshot.engines
        if isinstance(first_page, Failure):
            return None
        if isinstance(newest_page, Failure):
            if newest_page.reason is Reason.UNREACHABLE:
                return "the engine is gone: its page refuses connections"
            return None
        # A changed start time proves a restart. Without start times on a page, a restart cannot be
        # recognised.
        first_starts = _list_starts(first_page)
        newest_starts = _list_starts(newest_page)
        if first_starts and newest_starts and first_starts != newest_starts:
            return "the engine was restarted meanwhile"
        return None

    def find_bytes_per_request(self, labels: SeriesLabels) -> float | None:
        """Return a GPU's bytes per running request, which is the median over all samples.

        Returns None if no request ran in any sample.
        """
        return self._bytes_per_request[labels].quantile(0.5)


def _list_starts(page: EnginePage) -> set[float]:
    """Return the start times of the engines on a page.

    Engines whose start time is not reported are omitted.
    """
    return {
        engine.started_at_seconds
        for engine in page.engines
        if engine.started_at_seconds is not None
    }


RECORD_SECONDS: Final = 10.0
"""The time limit for writing a sample to the trace. A write takes microseconds. Next to a busy
engine, this process may get little CPU time. A delay of 4 s was observed.
"""

UNBOUNDED_BYTES: Final = 2**63
"""This value means "no limit", because a load's trace is never rotated."""

OTHER_MACHINE: Final = (
    "the server's host is another machine: run this beside vLLM, or name its GPUs here with --gpus"
)


class UnavailableSource:
    """Replaces the readers of NVML or /proc for a server on another machine."""

    def __init__(self, source: Source, reason: Reason) -> None:
        self._failure = Failure(source=source, reason=reason, message=OTHER_MACHINE)

    async def read(self, _timeout_seconds: float, _page: object = None) -> Failure:
        """Return the failure that reports that the server is on another machine."""
        return self._failure

    async def sample_used(self, _timeout_seconds: float) -> Mapping[str, int]:
        """Return an empty mapping, because there are no GPUs here."""
        return {}

    async def close(self) -> None:
        """Do nothing, because nothing is open."""


class Sampling:
    """Samples `parts` every `interval_seconds` and records each sample in `trace`.

    `overall` and `detector` receive all samples.
    """

    def __init__(
        self, *, parts: Parts, selection: Selection, interval_seconds: float, trace: Path
    ) -> None:
        self.overall = LoadObservation()
        self.detector = LeakReplay()
        self._step = LoadObservation()
        self._parts = parts
        self._interval_seconds = interval_seconds
        # Steps take samples in addition to the periodic samples. The lock ensures that only one
        # sample is taken at a time.
        self._turn = asyncio.Lock()
        # All derivations except the daemon's leak detector. `detector` replaces it and keeps the
        # history for the report.
        derivations = tuple(
            derivation for derivation in build_derivations() if derivation is not LEAK
        )
        self._sampler = Sampler(
            sources=parts,
            parse=parse_engines,
            rules=TickRules(selection=selection, derivations=derivations),
            clock=parts.clock,
            gpu_timeout_seconds=GPU_TIMEOUT_SECONDS,
        )
        self._recorder = Recorder(file=trace, max_bytes=UNBOUNDED_BYTES, seconds=RECORD_SECONDS)

    async def run(self) -> None:
        """Take a sample in every interval until cancelled."""
        await run_every(self._interval_seconds, self.sample, self._parts.clock)

    async def start_step(self, step: LoadObservation) -> None:
        """Collect all further samples in `step`, and take the first one immediately."""
        self._step = step
        await self.sample()

    async def sample(self) -> None:
        """Take one sample, waiting for any sample in progress."""
        async with self._turn:
            result = await self._sampler.tick()
            self.detector.step(result.snapshot)
            for observation in (self.overall, self._step):
                observation.add(result.snapshot, result.published.samples)
            await self._recorder.record(result.snapshot)

    async def close(self) -> None:
        """Close the engine's page and the GPUs."""
        await close_all(self._parts.engine, self._parts.gpus)


def create_trace(file: Path) -> None:
    """Write the header of a new trace.

    Raises BadInput if the file exists or cannot be created.
    """
    try:
        with file.open("xb") as stream:
            stream.write(encode_line(HEADER))
    except FileExistsError as error:
        raise BadInput(f"--trace {file}: is there already: name another file") from error
    except OSError as error:
        raise BadInput(f"--trace {file}: cannot be written: {error.strerror}") from error
