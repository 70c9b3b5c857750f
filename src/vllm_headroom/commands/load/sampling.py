"""The daemon's sampler, run beside the load; what it samples is recorded and looked at."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from vllm_headroom.commands.load.observed import Observed
from vllm_headroom.daemon.life import every
from vllm_headroom.daemon.parts import GPU_TIMEOUT_SECONDS, Parts
from vllm_headroom.daemon.sampler import Sampler
from vllm_headroom.daemon.sources import closed
from vllm_headroom.derive import LEAK, derivations
from vllm_headroom.derive.attribution import Selection
from vllm_headroom.model import Failure
from vllm_headroom.parse.page import parse_engines
from vllm_headroom.trace.errors import BadInput
from vllm_headroom.trace.recorder import Recorder
from vllm_headroom.trace.replay import Watch
from vllm_headroom.trace.write import HEADER, line
from vllm_headroom.vocabulary import Reason, Source

UNLIMITED: Final = 2**63
"""Bytes of the trace: it is one file, whatever its size."""

RECORD_SECONDS: Final = 10.0
"""A line takes microseconds, but this process may be short of CPU beside an engine that is not (seen: 4 s late)."""

ELSEWHERE: Final = "the server's host is another machine: run this beside vLLM, or name its GPUs here with --gpus"


class Elsewhere:
    """Stands in for NVML, or for /proc, where its GPUs or processes would not be the server's."""

    def __init__(self, source: Source, reason: Reason) -> None:
        self._failure = Failure(source=source, reason=reason, message=ELSEWHERE)

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

    def __init__(self, *, parts: Parts, selection: Selection, interval_seconds: float, trace: Path) -> None:
        self.whole = Observed()
        self.watch = Watch()
        self._step = Observed()
        self._parts = parts
        self._interval_seconds = interval_seconds
        self._turn = asyncio.Lock()
        self._sampler = Sampler(
            sources=parts,
            parse=parse_engines,
            selection=selection,
            derivations=tuple(each for each in derivations() if each is not LEAK),  # `watch` has the detector
            clock=parts.clock,
            gpu_timeout_seconds=GPU_TIMEOUT_SECONDS,
        )
        self._recorder = Recorder(file=trace, max_bytes=UNLIMITED, seconds=RECORD_SECONDS)

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
            self.watch.step(snapshot)
            for observed in (self.whole, self._step):
                observed.take(snapshot, published.samples)
            await self._recorder.record(snapshot)

    async def close(self) -> None:
        """Let go of what is read."""
        await closed(self._parts.engine, self._parts.gpus)


def new_trace(file: Path) -> None:
    """Begin a trace; raises BadInput where there is a file or none can be made."""
    try:
        with file.open("xb") as stream:
            stream.write(line(HEADER))
    except FileExistsError as error:
        raise BadInput(f"--trace {file}: is there already: name another file") from error
    except OSError as error:
        raise BadInput(f"--trace {file}: cannot be written: {error.strerror}") from error
