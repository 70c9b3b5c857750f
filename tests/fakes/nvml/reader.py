"""Runs the NVML reader over the fake library, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest

from tests.fakes.nvml.library import FakeGpu, FakeNvml
from vllm_headroom.model import Failure, GpuReading, GpuReadings
from vllm_headroom.scrape.nvml.reader import Nvml
from vllm_headroom.vocabulary import Reason

T = TypeVar("T")
DEADLINE_SECONDS: Final = 20.0
TIMEOUT_SECONDS: Final = 10.0


class Clock:
    """A clock that moves when the test says so."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@contextlib.contextmanager
def in_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch, gpus: list[FakeGpu] | None = None, *, no_v2: bool = False
) -> Iterator[FakeNvml]:
    """Make this process use a fake library; at the end let go of hanging calls and wait until their threads are gone.

    A thread that outlived its test would carry the handles of its library into the next one.
    """
    fake = FakeNvml(folder, gpus, no_v2=no_v2)
    fake.load(monkeypatch)
    yield fake
    fake.hangs, fake.gpus = {}, []
    fake.write()
    for thread in threading.enumerate():
        if thread.name == "nvml":
            thread.join(DEADLINE_SECONDS)
            assert not thread.is_alive()


def run(
    steps: Callable[[Nvml], Awaitable[T]], *, monotonic: Callable[[], float] = time.monotonic, **settings: Any
) -> T:
    """Run `steps` with a reader that is closed afterwards, and return what they return."""

    async def main() -> T:
        nvml = Nvml(monotonic=monotonic, **settings)
        try:
            return await steps(nvml)
        finally:
            await nvml.close()

    return asyncio.run(main())


async def devices(nvml: Nvml, timeout_seconds: float = TIMEOUT_SECONDS) -> tuple[GpuReading, ...]:
    """Return the devices of one reading, which must not fail as a whole."""
    readings = await nvml.read(timeout_seconds)
    assert isinstance(readings, GpuReadings), readings
    return readings.devices


def reasons(readings: tuple[GpuReading, ...]) -> list[Reason | None]:
    """Return why each device failed, None for those that did not."""
    return [reading.failure.reason if reading.failure else None for reading in readings]


async def failure(nvml: Nvml, timeout_seconds: float = TIMEOUT_SECONDS) -> Failure:
    """Return the failure of one reading, which must fail as a whole."""
    readings = await nvml.read(timeout_seconds)
    assert isinstance(readings, Failure), readings
    return readings


async def until(nvml: Nvml, wanted: Callable[[GpuReadings | Failure], bool]) -> GpuReadings | Failure:
    """Read until a reading is as wanted, and return it."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while True:
            readings = await nvml.read(TIMEOUT_SECONDS)
            if wanted(readings):
                return readings
            await asyncio.sleep(0.01)
