"""The daemon's sampler, run beside the load; what it samples is recorded and looked at."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from vllm_headroom.commands.load.observed import Observed
from vllm_headroom.daemon.life import every
from vllm_headroom.daemon.parts import GPU_TIMEOUT_SECONDS, Parts
from vllm_headroom.daemon.sampler import Sampler
from vllm_headroom.daemon.sources import Sources
from vllm_headroom.derive import derivations
from vllm_headroom.derive.attribution import Selection
from vllm_headroom.model import EnginePage, Failure, GpuReadings, ProcessReadings, Snapshot
from vllm_headroom.parse.page import parse_engines
from vllm_headroom.scrape.worker import Worker
from vllm_headroom.trace.errors import BadInput
from vllm_headroom.trace.recorder import Recorder
from vllm_headroom.trace.write import HEADER, line
from vllm_headroom.vocabulary import Reason, Source

UNLIMITED: Final = 2**63
"""Bytes of the trace: it is one file, whatever its size."""

RECORD_SECONDS: Final = 10.0
"""A line takes microseconds, but this process may be short of CPU beside an engine that is not (seen: 4 s late)."""

ELSEWHERE: Final = "the server's host is another machine: run this beside vLLM, or name its GPUs here with --gpus"


class GpusElsewhere:
    """Stands in for NVML where its GPUs would not be the server's."""

    async def read(self, _timeout_seconds: float) -> GpuReadings | Failure:
        """Return why there is none."""
        return Failure(source=Source.NVML, reason=Reason.NO_DEVICES, message=ELSEWHERE)

    async def sample_used(self, _timeout_seconds: float) -> Mapping[str, int]:
        """Have nothing to look at."""
        return {}

    async def close(self) -> None:
        """Have nothing to let go of."""


class ProcessesElsewhere:
    """Stands in for /proc where its processes would not be the server's."""

    async def read(self, _timeout_seconds: float) -> ProcessReadings | Failure:
        """Return why there is none."""
        return Failure(source=Source.PROCESS, reason=Reason.UNAVAILABLE, message=ELSEWHERE)


class Sampling:
    """Samples `parts` every `interval_seconds` into `trace`; `whole` has seen all of it.

    `failures` has, of each source that failed, in how many of the samples, and the newest failure.
    """

    def __init__(self, *, parts: Parts, selection: Selection, interval_seconds: float, trace: Path) -> None:
        self.whole = Observed()
        self.samples = 0
        self.failures: dict[Source, tuple[int, Failure]] = {}
        self.first: Snapshot | None = None
        self.last: Snapshot | None = None
        self._step = Observed()
        self._parts = parts
        self._interval_seconds = interval_seconds
        self._turn = asyncio.Lock()
        self._sampler = Sampler(
            sources=Sources(engine=parts.engine, gpus=parts.gpus, processes=parts.processes, probe=parts.probe),
            parse=parse_engines,
            selection=selection,
            derivations=derivations(),
            clock=parts.clock,
            gpu_timeout_seconds=GPU_TIMEOUT_SECONDS,
        )
        self._recorder = Recorder(
            file=trace, max_bytes=UNLIMITED, call=Worker[None]("trace").call, seconds=RECORD_SECONDS
        )

    async def run(self) -> None:
        """Sample until cancelled."""
        await every(self._interval_seconds, self.tick, self._parts.clock)

    async def look(self, step: Observed) -> None:
        """Let `step` take what is sampled from now on, a sample of this moment first."""
        self._step = step
        await self.tick()

    async def tick(self) -> None:
        """Take one sample."""
        async with self._turn:
            await self._sampler.tick()
            snapshot, published = self._sampler.snapshot, self._sampler.published
            assert snapshot is not None and published is not None  # noqa: S101, PT018 - a tick leaves both
            self._note(snapshot)
            for observed in (self.whole, self._step):
                observed.take(snapshot, published.samples)
            await self._recorder.record(snapshot)

    def _note(self, snapshot: Snapshot) -> None:
        self.samples += 1
        self.first, self.last = self.first or snapshot, snapshot
        for part in (snapshot.engines, snapshot.gpus, snapshot.processes, snapshot.probe):
            if isinstance(part, Failure):
                count, _ = self.failures.get(part.source, (0, part))
                self.failures[part.source] = (count + 1, part)

    async def close(self) -> None:
        """Let go of what is read."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GPU_TIMEOUT_SECONDS):
                await self._parts.engine.close()
                await self._parts.gpus.close()


def new_trace(file: Path) -> None:
    """Begin a trace; raises BadInput where there is a file or none can be made."""
    try:
        with file.open("xb") as stream:
            stream.write(line(HEADER))
    except FileExistsError as error:
        raise BadInput(f"--trace {file}: is there already: name another file") from error
    except OSError as error:
        raise BadInput(f"--trace {file}: cannot be written: {error.strerror}") from error


def ended(first: Snapshot | None, last: Snapshot | None) -> str | None:
    """Return how the engine ended between two samples: it is gone, or another started; None where it did not."""
    if first is None or last is None or not isinstance(first.engines, EnginePage):
        return None
    if isinstance(last.engines, Failure):
        return "the engine is gone: its page refuses connections" if last.engines.reason is Reason.UNREACHABLE else None
    began, ends = _starts(first.engines), _starts(last.engines)
    return "the engine was restarted meanwhile" if began and ends and began != ends else None


def _starts(page: EnginePage) -> frozenset[float]:
    return frozenset(engine.started_at_seconds for engine in page.engines if engine.started_at_seconds is not None)
