"""The sources outside the daemon that each tick reads."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol

from msgspec import Struct

from vllm_headroom.model import (
    EnginePage,
    Failure,
    GpuReadings,
    LogReading,
    ProbedProcess,
    ProcessReadings,
    TokenBytes,
)

CLOSE_SECONDS: Final = 0.3
"""The time limit for closing all sources. The limit for the entire exit is one second."""


class Closable(Protocol):
    """A resource that must be closed."""

    async def close(self) -> None:
        """Release the resource."""


class EngineSource(Closable, Protocol):
    """The source of the engine's page."""

    async def fetch(self) -> str | Failure:
        """Return the page's text, or a Failure if it could not be read; never raise."""


class GpuSource(Closable, Protocol):
    """The source of GPU readings."""

    async def read(self, timeout_seconds: float) -> GpuReadings | Failure:
        """Return one reading of every device, or a Failure if reading fails; never raise."""

    async def sample_used(self, timeout_seconds: float) -> Mapping[str, int]:
        """Return the used bytes of each readable GPU, keyed by UUID, and update the peaks."""


ReadProcesses = Callable[[float, EnginePage | Failure], Awaitable[ProcessReadings | Failure]]
"""Finds the engine's processes with the help of its page. The number is the time limit in seconds.
"""

ReadProbe = Callable[[float], Awaitable[tuple[ProbedProcess, ...] | Failure]]
"""Returns the last record of each process in which the probe runs. The number is the time limit in
seconds.
"""

ReadLog = Callable[[float], Awaitable[LogReading | Failure]]
"""Returns what the engine's log shows so far. The number is the time limit in seconds."""

FindServedModel = Callable[[ProcessReadings | Failure], TokenBytes | None]
"""Returns the bytes per token of the model that the engine's processes load. Returns None if they
are unknown.
"""


class Sources(Struct, frozen=True, kw_only=True):
    """The sources that one tick reads in parallel, each within a time limit."""

    engine: EngineSource
    gpus: GpuSource
    processes: ReadProcesses
    probe: ReadProbe | None = None
    """The function that reads the probe's files, or None if no probe folder is configured."""
    log: ReadLog | None = None
    """The function that reads the engine's log, or None if no engine log is configured."""
    model: FindServedModel | None = None
    """The function that finds the served model. None if the bytes per token are configured."""


class AnyParts(Protocol):
    """The parts of a daemon that read outside sources."""

    def list_resources(self) -> tuple[Closable | None, ...]:
        """Return the resources to close on shutdown."""


async def close_all(*resources: Closable | None) -> None:
    """Close the resources one after another, giving up after CLOSE_SECONDS."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_SECONDS):
            for resource in resources:
                if resource is not None:
                    await resource.close()
