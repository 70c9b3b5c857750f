"""The steps of a load one after another, with what runs beside them."""

import asyncio
import sys
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil, inf
from operator import add
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from vllm_headroom import catalog
from vllm_headroom.daemon.loop import run_every
from vllm_headroom.daemon.parts import GPU_TIMEOUT_SECONDS, Parts
from vllm_headroom.daemon.sampler import Sampler
from vllm_headroom.daemon.sources import close_all
from vllm_headroom.derive import LEAK, build_derivations
from vllm_headroom.derive.attribution import Selection
from vllm_headroom.derive.readings import label_gpu
from vllm_headroom.model import EnginePage, Failure, Metric, Sample, Snapshot
from vllm_headroom.parse.engines import parse_engines
from vllm_headroom.trace.entries import HEADER, encode_line
from vllm_headroom.trace.recorder import Recorder
from vllm_headroom.vocabulary import Reason, Source
from vllm_headroom_tools.cli import write_note
from vllm_headroom_tools.history import Histogram, LeakReplay
from vllm_headroom_tools.load.clients import Clients
from vllm_headroom_tools.load.stream import Outcome, Tally
from vllm_headroom_tools.progress import start_bar, update_bar
from vllm_headroom_tools.terminal import is_terminal
from vllm_headroom_tools.trace import BadInput

if TYPE_CHECKING:
    from rich.progress import Progress


Labels = tuple[str, ...]
"""Index and UUID of a GPU, or the role of processes."""

COMBINED: Final[dict[Metric, Callable[[float, float], float]]] = {
    catalog.ENGINE_RUNNING: add,
    catalog.ENGINE_WAITING: add,
    catalog.ENGINE_PREEMPTIONS: add,
    catalog.ENGINE_FINISHED: add,
    catalog.ENGINE_KV_USED: max,
}
"""How the figures of several engines are combined: of KV caches the fullest counts."""


class SeriesSummary(Struct):
    """A figure over time: its first, newest and highest value, and whether it ever fell."""

    first: float
    last: float
    most: float
    fell: bool = False


class SeriesSummaries(dict[Labels, SeriesSummary]):
    """The span of each series of one figure."""

    def take(self, labels: Labels, value: float | None) -> None:
        """Take the next value of a series, where it is known."""
        if value is not None:
            span = self.setdefault(labels, SeriesSummary(value, value, value))
            span.fell = span.fell or value < span.last
            span.last, span.most = value, max(span.most, value)


class LoadObservation:
    """Collects the samples of a stretch; what none of them had is absent.

    `failures` has, of each source that failed, in how many of the samples, and the newest failure.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.failures: dict[Source, tuple[int, Failure]] = {}
        self.first: Snapshot | None = None
        self.last: Snapshot | None = None
        self.held = SeriesSummaries()
        self.host = SeriesSummaries()
        self._engine = SeriesSummaries()
        self._per_request: defaultdict[Labels, Histogram] = defaultdict(Histogram)

    def take(self, snapshot: Snapshot, samples: Iterable[Sample]) -> None:
        """Take one tick: what was read, and what the daemon derives of it."""
        self.samples += 1
        self.first, self.last = self.first or snapshot, snapshot
        for failure in snapshot.failures:
            count, _ = self.failures.get(failure.source, (0, failure))
            self.failures[failure.source] = (count + 1, failure)
        for gpu in snapshot.devices:
            self.held.take(label_gpu(gpu), gpu.held_bytes)
        engine: defaultdict[str, float] = defaultdict(float)
        for sample in samples:
            name = sample.metric.name
            if sample.metric is catalog.MEMORY_PER_RUNNING_REQUEST:
                self._per_request[sample.labels].add(sample.value)
            elif sample.metric is catalog.HOST_MEMORY:
                self.host.take(sample.labels, sample.value)
            elif sample.metric in COMBINED:
                engine[name] = COMBINED[sample.metric](engine[name], sample.value)
        for name, value in engine.items():
            self._engine.take((name,), value)

    def engine(self, metric: Metric) -> SeriesSummary | None:
        """Return the summary of one of the engine's figures; None where the engine did not export it."""
        return self._engine.get((metric.name,))

    def count_growth(self, metric: Metric) -> float | None:
        """Return what one of the engine's counters counted; None where it was not exported, or was reset."""
        span = self.engine(metric)
        return None if span is None or span.fell else span.last - span.first

    @property
    def seconds(self) -> float:
        """The time from the first sample to the newest."""
        if self.first is None or self.last is None:
            return 0.0
        return self.last.monotonic_seconds - self.first.monotonic_seconds

    @property
    def ended(self) -> str | None:
        """How the engine ended during the load: it is gone, or another started; None where it did not."""
        first = None if self.first is None else self.first.engines
        last = None if self.last is None else self.last.engines
        if not isinstance(first, EnginePage) or last is None:
            return None
        if isinstance(last, Failure):
            gone = "the engine is gone: its page refuses connections"
            return gone if last.reason is Reason.UNREACHABLE else None
        began, ends = (
            {each.started_at_seconds for each in page.engines} - {None} for page in (first, last)
        )
        return "the engine was restarted meanwhile" if began and ends and began != ends else None

    def bytes_per_request(self, labels: Labels) -> float | None:
        """Return the median of what a running request cost on a GPU; None where nothing was seen to run."""
        return self._per_request[labels].quantile(0.5)


RECORD_SECONDS: Final = 10.0
"""A line takes microseconds, but this process may be short of CPU beside an engine that is not (seen: 4 s late)."""

OTHER_MACHINE: Final = (
    "the server's host is another machine: run this beside vLLM, or name its GPUs here with --gpus"
)


class UnavailableSource:
    """Replaces NVML or /proc on a machine whose GPUs or processes are not the server's."""

    def __init__(self, source: Source, reason: Reason) -> None:
        self._failure = Failure(source=source, reason=reason, message=OTHER_MACHINE)

    async def read(self, _timeout_seconds: float, _page: object = None) -> Failure:
        """Return why there is none."""
        return self._failure

    async def sample_used(self, _timeout_seconds: float) -> Mapping[str, int]:
        """Have nothing to look at."""
        return {}

    async def close(self) -> None:
        """Have nothing to let go of."""


class Sampling:
    """Samples `parts` every `interval_seconds` into `trace`; `whole` and the detector in `watch` see all of it."""

    def __init__(
        self, *, parts: Parts, selection: Selection, interval_seconds: float, trace: Path
    ) -> None:
        self.whole = LoadObservation()
        self.watch = LeakReplay()
        self._step = LoadObservation()
        self._parts = parts
        self._interval_seconds = interval_seconds
        self._turn = asyncio.Lock()
        self._sampler = Sampler(
            sources=parts,
            parse=parse_engines,
            selection=selection,
            derivations=tuple(
                each for each in build_derivations() if each is not LEAK
            ),  # `watch` has the detector
            clock=parts.clock,
            gpu_timeout_seconds=GPU_TIMEOUT_SECONDS,
        )
        self._recorder = Recorder(file=trace, max_bytes=2**63, seconds=RECORD_SECONDS)

    async def run(self) -> None:
        """Sample until cancelled."""
        await run_every(self._interval_seconds, self.tick, self._parts.clock)

    async def look(self, step: LoadObservation) -> None:
        """Let `step` take what is sampled from now on, a sample of this moment first."""
        self._step = step
        await self.tick()

    async def tick(self) -> None:
        """Take one sample."""
        async with self._turn:
            result = await self._sampler.tick()
            self.watch.step(result.snapshot)
            for observed in (self.whole, self._step):
                observed.take(result.snapshot, result.published.samples)
            await self._recorder.record(result.snapshot)

    async def close(self) -> None:
        """Let go of what is read."""
        await close_all(self._parts.engine, self._parts.gpus)


def create_trace(file: Path) -> None:
    """Begin a trace; raises BadInput where there is a file or none can be made."""
    try:
        with file.open("xb") as stream:
            stream.write(encode_line(HEADER))
    except FileExistsError as error:
        raise BadInput(f"--trace {file}: is there already: name another file") from error
    except OSError as error:
        raise BadInput(f"--trace {file}: cannot be written: {error.strerror}") from error


LINE_SECONDS: Final = 10.0


class Screen:
    """Shows on standard error how far each step has come: a bar on a terminal, a line every ten seconds elsewhere."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._next_seconds = inf

    def begin(self, title: str, seconds: float) -> None:
        """Show that a step begins."""
        if is_terminal(sys.stderr):
            self._bar = start_bar(title, seconds, transient=False)
        else:
            self._next_seconds = LINE_SECONDS
            write_note(f"{title}, {seconds:g} s")

    def show(self, tally: Tally, elapsed_seconds: float, *, is_over: bool = False) -> None:
        """Show how far it has come, while there is a step, and if it is time for a line; the last bar stays."""
        good, out_of_memory = (
            tally.outcomes[each] for each in (Outcome.SUCCEEDED, Outcome.OUT_OF_MEMORY)
        )
        text = f"{tally.open} open, {good} succeeded, {tally.outcomes.total() - good - out_of_memory} not"
        text += f", {out_of_memory} OUT OF MEMORY" if out_of_memory else ""
        if self._bar is not None:
            update_bar(self._bar, elapsed_seconds, text)
            if is_over:
                self._bar.stop()
                self._bar = None
        elif is_over or elapsed_seconds >= self._next_seconds:
            self._next_seconds = inf if is_over else self._next_seconds + LINE_SECONDS
            write_note(f"  {elapsed_seconds:3.0f} s  {text}{'; over' if is_over else ''}")


SHARES: Final = (0.5, 0.75, 1.0, 1.2)
"""Below, near, at and beyond the concurrency of the order: overload shows in the last."""

STOP_SECONDS: Final = 1.0

DELAY_SECONDS: Final = 0.1
"""How often this process's own delay is measured."""

GONE_SECONDS: Final = 15.0
"""An engine that is gone or another for so long does not come back as it was: the rest of the load says nothing."""


class Stage(Struct, frozen=True, kw_only=True):
    """A step that is over: `seconds` is from its begin to the end of its last request, `rate` what was offered."""

    share: float
    clients: int
    rate: float | None = None
    seconds: float
    tally: Tally
    observed: LoadObservation


def count_streams(concurrency: int, share: float = max(SHARES)) -> int:
    """Return how many streams a step opens, without `share` the largest."""
    return ceil(round(concurrency * share, 6))


@dataclass(slots=True, kw_only=True)
class LoadRun:
    """Runs every step for `seconds`, until the clients are stopped, their cap is reached or the engine has ended."""

    concurrency: int
    seconds: float
    clients: Clients
    sampling: Sampling
    screen: Screen = field(default_factory=Screen, init=False)
    has_lost_engine: bool = field(default=False, init=False)
    _tally: Tally = field(default_factory=lambda: Tally(0.0), init=False)

    async def steps(self) -> tuple[Stage, ...]:
        """Return the steps that began, the last of them cut short where it was stopped."""
        done: list[Stage] = []
        self._tally = Tally(monotonic())
        async with asyncio.TaskGroup() as group:
            others = (self.sampling.run(), self._measure_delays(), self._watch())
            aside = [group.create_task(each) for each in others]
            for number, share in enumerate(SHARES, start=1):
                if not self.clients.stopped and not self.clients.is_used_up:
                    done.append(await self._step(number, share))
            for task in aside:
                task.cancel()
        return tuple(done)

    async def _step(self, number: int, share: float) -> Stage:
        count, observed = count_streams(self.concurrency, share), LoadObservation()
        await self._sample(self.sampling.look(observed))
        tally = self._tally = Tally(monotonic())
        self.screen.begin(
            f"step {number}/{len(SHARES)}: {share:.0%}, {count} clients", self.seconds
        )
        await self.clients.run(count, self.seconds, tally, share)
        seconds = monotonic() - tally.began_seconds
        await self._sample(self.sampling.tick())
        self.screen.show(tally, seconds, is_over=True)
        return Stage(
            share=share,
            clients=count,
            rate=self.clients.rate,
            seconds=seconds,
            tally=tally,
            observed=observed,
        )

    async def _sample(self, sample: Coroutine[Any, Any, None]) -> None:
        """Take a sample, after a stop within a second: a server that hangs has no page."""
        task, has_time = asyncio.create_task(sample), True
        while has_time and not task.done():
            has_time = not self.clients.stopped
            await asyncio.wait([task], timeout=STOP_SECONDS)
        if task.done():
            task.result()
        task.cancel()

    async def _measure_delays(self) -> None:
        """Measure how late the loop is: its delay looks like the server's."""
        while True:
            due = monotonic() + DELAY_SECONDS
            await asyncio.sleep(DELAY_SECONDS)
            self._tally.delays.add(max(0.0, monotonic() - due))

    async def _watch(self) -> None:
        """Show how far it has come, and stop where the engine has ended for so long."""
        seen_seconds = monotonic()
        while True:
            await asyncio.sleep(1.0)
            self.screen.show(self._tally, monotonic() - self._tally.began_seconds)
            if self.sampling.whole.ended is None and not self._tally.engine_dead:
                seen_seconds = monotonic()
            elif monotonic() - seen_seconds >= GONE_SECONDS and not self.clients.stopped:
                self.has_lost_engine = True
                self.clients.stop()
