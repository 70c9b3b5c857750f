"""What one tick reads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Final, Protocol

from msgspec import Struct

from vllm_headroom.model import EnginePage, Failure, GpuReadings, ProbedProcess, ProcessReadings

CLOSE_SECONDS: Final = 0.3


class Closable(Protocol):
    """What holds something open."""

    async def close(self) -> None:
        """Let go of it."""


class EngineSource(Closable, Protocol):
    """Where the engine's page comes from."""

    async def fetch(self) -> str | Failure:
        """Return the page's text."""


class GpuSource(Closable, Protocol):
    """Where GPU readings come from."""

    async def read(self, timeout_seconds: float) -> GpuReadings | Failure:
        """Return one reading of every device."""

    async def sample_used(self, timeout_seconds: float) -> Mapping[str, int]:
        """Return the memory in use by UUID, and note it for its peak; without those that cannot be read now."""


class ProcessSource(Protocol):
    """Where the engine's processes are found."""

    async def read(self, timeout_seconds: float, page: EnginePage | Failure) -> ProcessReadings | Failure:
        """Return the engine's processes, which what came of asking for its page helps to tell."""


class ProbeSource(Protocol):
    """Where the probe inside the engine writes."""

    async def read(self, timeout_seconds: float) -> tuple[ProbedProcess, ...] | Failure:
        """Return what each process wrote last."""


async def closed(*opened: Closable | None) -> None:
    """Close what was opened, unless that takes long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_SECONDS):
            for each in opened:
                if each is not None:
                    await each.close()


class Sources(Struct, frozen=True, kw_only=True):
    """What one tick reads, side by side; `probe` is None where no folder is configured."""

    engine: EngineSource
    gpus: GpuSource
    processes: ProcessSource
    probe: ProbeSource | None = None
