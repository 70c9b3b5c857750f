"""The series that the daemon would have exported during a trace, as OpenMetrics with timestamps."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from math import nan
from tempfile import TemporaryFile
from typing import IO, Any, Final

from msgspec import Struct, field
from msgspec.structs import replace

from vllm_headroom import catalog
from vllm_headroom.daemon.app import read_build
from vllm_headroom.derive.attribution import Selection, add_lost_gpus
from vllm_headroom.derive.leak.leak import LeakMemory
from vllm_headroom.derive.tick import (
    LEAK,
    Derivation,
    Evaluation,
    TickRules,
    build_derivations,
    run_unguarded,
)
from vllm_headroom.model import Metric, ReadingTime, Sample, Snapshot
from vllm_headroom.vocabulary import MetricType, Source
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.history import LeakReplay

HEALTH: Final = "health"
"""The derivation that reports whether each source could be read."""

TRACED_SOURCES: Final = (Source.ENGINE, Source.NVML, Source.PROCESS)
"""The sources that the daemon reads for every sample; a trace shows when they failed."""

READING_TIMES: Final = tuple(
    ReadingTime(source=source, seconds=nan, ended_monotonic_seconds=nan)
    for source in TRACED_SOURCES
)
"""The reading time of each source. It is NaN because a trace does not contain it. A value that is
not finite produces no series.
"""

UP: Final = Metric(
    name="up",
    kind=MetricType.GAUGE,
    labels=(),
    help="1 at each sample: a Prometheus adds it when it scrapes.",
)
"""Dashboards and alerts query this metric, even though the daemon does not export it."""

SCRAPE_LABELS: Final = 'job="vllm-headroom",instance="replay"'
"""The labels that Prometheus would add."""

MOST_BUFFERED_POINTS: Final = 500_000
"""Our choice: at most this many points in total are kept in memory. They take 8 MB."""

POINT_NUMBERS: Final = 2
"""A point has a time in seconds since the epoch, and a value."""


class SampleExport:
    """Derives the daemon's samples from each snapshot, and stores them by series.

    The daemon's default settings are used, because a trace does not contain the operator's
    settings. `reported_bytes` is the operator's figure for the engine's memory on each GPU.
    """

    def __init__(self, *, has_health: bool, reported_bytes: int | None = None) -> None:
        """Set `has_health` if a source without data has failed, as in a trace."""
        self._has_health = has_health
        derivations: list[Derivation[Any]] = []
        for derivation in build_derivations(reported_bytes=reported_bytes):
            # The detector has already run, so its results are reused.
            if derivation.name == LEAK.name:
                derivations.append(replace(LEAK, step=self._read_leaks))
            elif has_health or derivation.name != HEALTH:
                derivations.append(derivation)
        rules = TickRules(
            selection=Selection(),
            derivations=tuple(derivations),
            reported_bytes=reported_bytes,
        )
        self._evaluation = Evaluation(rules, run_unguarded)
        self._leak_memory: LeakMemory = LEAK.initial
        self._leak_samples: tuple[Sample, ...] = ()
        self._constant_samples = (
            Sample(UP, (), 1.0),
            Sample(catalog.BUILD_INFO, read_build(), 1.0),
            Sample(catalog.SAMPLE_AGE, (), 0.0),
        )
        self._newest_milliseconds = -1
        self._spool = SeriesSpool()

    def step(self, snapshot: Snapshot, replay: LeakReplay) -> None:
        """Add a snapshot with the engine's state, which `replay` has just processed.

        If the clock was set back, a snapshot adds no samples. Prometheus rejects samples that are
        older than the newest one of their series.
        """
        samples = self._derive(snapshot, replay)
        # Prometheus timestamps have millisecond precision.
        milliseconds = round(snapshot.time_seconds * 1000)
        if milliseconds <= self._newest_milliseconds:
            return
        self._newest_milliseconds = milliseconds
        self._spool.add(milliseconds / 1000, samples)

    def write_lines(self) -> Iterator[str]:
        """Yield the lines of the OpenMetrics text; raise BadInput if the spool cannot be read."""
        return self._spool.write_lines()

    def close(self) -> None:
        """Delete the stored samples."""
        self._spool.close()

    def _derive(self, snapshot: Snapshot, replay: LeakReplay) -> list[Sample]:
        """Return all samples of a snapshot in the daemon's order."""
        self._leak_memory = replay.leak_memory
        self._leak_samples = replay.leak_samples
        if self._has_health:
            snapshot = replace(snapshot, reading_times=READING_TIMES)
        result = self._evaluation.judge(add_lost_gpus(snapshot))
        return [*self._constant_samples, *result.published.samples]

    def _read_leaks(
        self, _memory: LeakMemory, _snapshot: Snapshot
    ) -> tuple[LeakMemory, tuple[Sample, ...]]:
        """Return the replay's results for this snapshot, so that the detector runs only once."""
        return self._leak_memory, self._leak_samples


class _Series(Struct):
    """The points of one series.

    The newest are in memory, the older ones in the spool file.
    """

    points: array[float] = field(default_factory=lambda: array("d"))
    """Times and values, alternating."""

    chunks: list[tuple[int, int]] = field(default_factory=list)
    """The offset and size in bytes of each chunk of older points in the file."""


class SeriesSpool:
    """Stores points grouped by series, as OpenMetrics requires, in a bounded amount of memory.

    The points are written to a temporary file, which is deleted when it is closed. Every method
    raises BadInput if the file cannot be written or read.
    """

    def __init__(self) -> None:
        self._families: dict[str, dict[tuple[str, ...], _Series]] = {UP.name: {}}
        """The series by metric name and labels, in the order of the page."""
        for metric in catalog.METRICS:
            self._families[metric.name] = {}
        self._buffered_points = 0
        self._file: IO[bytes] | None = None

    def add(self, seconds: float, samples: Iterable[Sample]) -> None:
        """Add a point to the series of each sample.

        Raises BadInput if the temporary file cannot be written.
        """
        for metric, labels, value in samples:
            family = self._families[metric.name]
            series = family.get(labels)
            if series is None:
                series = _Series()
                family[labels] = series
            series.points.append(seconds)
            # A trace may cover months. The points of a long trace do not fit in memory, so points
            # are written to a file.
            series.points.append(value)
            self._buffered_points += 1
        if self._buffered_points > MOST_BUFFERED_POINTS:
            self._flush()

    def _flush(self) -> None:
        """Move the points in memory to the file.

        Raises BadInput if the file cannot be written.
        """
        try:
            if self._file is None:
                self._file = TemporaryFile()  # noqa: SIM115 - it stays open as long as the spool
            offset_bytes = self._file.tell()
            for family in self._families.values():
                # The points of a series are in several chunks of the file. The position of each
                # chunk is stored.
                for series in family.values():
                    if not series.points:
                        continue
                    size_bytes = self._file.write(series.points.tobytes())
                    series.chunks.append((offset_bytes, size_bytes))
                    series.points = array("d")
                    offset_bytes += size_bytes
        except OSError as error:
            raise BadInput(
                "--openmetrics: the temporary file cannot be written, TMPDIR may name another"
                f" directory: {error.strerror}"
            ) from error
        self._buffered_points = 0

    def write_lines(self) -> Iterator[str]:
        """Yield the lines of the text, family by family, with each series in one piece.

        Raises BadInput if the temporary file cannot be read.
        """
        for metric in (UP, *catalog.METRICS):
            family = self._families[metric.name]
            if not family:
                continue
            yield from _write_head(metric)
            for labels, series in family.items():
                # OpenMetrics requires the points of a series to be contiguous.
                name = _write_name(metric, labels)
                for points in self._list_points(series):
                    for place in range(0, len(points), POINT_NUMBERS):
                        seconds = points[place]
                        value = points[place + 1]
                        yield f"{name} {value!r} {seconds:.3f}\n"
        yield "# EOF\n"

    def close(self) -> None:
        """Delete the temporary file."""
        if self._file is not None:
            self._file.close()

    def _list_points(self, series: _Series) -> Iterator[array[float]]:
        """Yield the points of a series in chunks, oldest first.

        Raises BadInput if the file cannot be read.
        """
        for offset_bytes, size_bytes in series.chunks:
            assert self._file is not None, "only a flush adds chunks"  # noqa: S101
            try:
                self._file.seek(offset_bytes)
                stored = self._file.read(size_bytes)
            except OSError as error:
                raise BadInput(
                    f"--openmetrics: the temporary file cannot be read: {error.strerror}"
                ) from error
            yield array("d", stored)
        yield series.points


def _write_head(metric: Metric) -> Iterator[str]:
    """Yield a family's metadata lines; in OpenMetrics, a counter's family name has no suffix."""
    name = metric.name
    if metric.kind is MetricType.COUNTER:
        name = name.removesuffix("_total")
    yield f"# HELP {name} {_escape(metric.help)}\n"
    yield f"# TYPE {name} {metric.kind}\n"


def _write_name(metric: Metric, labels: tuple[str, ...]) -> str:
    """Return a series' name with its labels and the scrape labels."""
    pairs = [SCRAPE_LABELS]
    for label, value in zip(metric.labels, labels, strict=True):
        pairs.append(f'{label}="{_escape(value)}"')
    return f"{metric.name}{{{','.join(pairs)}}}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
