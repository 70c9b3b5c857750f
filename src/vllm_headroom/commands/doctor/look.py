"""One look through the daemon's own readers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from vllm_headroom.config.settings import Settings
from vllm_headroom.daemon.app import GPU_TIMEOUT_SECONDS, page_reader
from vllm_headroom.derive.attribution import AttributionState, attribute
from vllm_headroom.model import EnginePage, Failure, Gpu, GpuReadings, ProcessReadings
from vllm_headroom.parse import parse_engines
from vllm_headroom.parse.version import server_version
from vllm_headroom.scrape.http.failures import without_secrets
from vllm_headroom.scrape.http.reader import PageReader, port_of
from vllm_headroom.scrape.nvml.reader import Nvml
from vllm_headroom.scrape.proc.files import command
from vllm_headroom.scrape.proc.reader import Processes
from vllm_headroom.scrape.proc.roots import served_port
from vllm_headroom.scrape.worker import Worker

PATIENCE_SECONDS: Final = 6.0
"""For each source, all at the same time: the whole look has to be over within ten seconds."""

ASIDE_SECONDS: Final = 1.0
"""For what only helps: the engine's version, and the port in its command line."""

GOODBYE_SECONDS: Final = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What was seen; `gpus` is empty where NVML failed.

    `url` is where the engine's page should be, without user and password. `version` is what the server calls itself,
    None where it does not. `served_port` is the port in the command line of the engine that runs here, None where it is
    not known. `daemon_waits_seconds` is how long the daemon waits for the page, which may be longer than the doctor.
    """

    url: httpx.URL
    page: EnginePage | Failure
    version: str | None
    readings: GpuReadings | Failure
    gpus: tuple[Gpu, ...]
    processes: ProcessReadings | Failure
    served_port: int | None
    daemon_waits_seconds: float


async def look(settings: Settings, proc: Path) -> Sight:
    """Read the engine's page, NVML and `proc` once, side by side, as the daemon does with these settings."""
    url = httpx.URL(settings.engine_url)
    daemon_waits = min(settings.engine_timeout_seconds, settings.sample_interval_seconds)
    async with asyncio.TaskGroup() as group:
        page = group.create_task(
            fetched(page_reader(settings, str(url), timeout_seconds=min(daemon_waits, PATIENCE_SECONDS)))
        )
        about = group.create_task(
            fetched(page_reader(settings, str(url.join("version")), timeout_seconds=ASIDE_SECONDS))
        )
        gpus = group.create_task(_gpu_readings())
        found = group.create_task(_processes(url, proc))
    text, readings, processes = page.result(), gpus.result(), found.result()
    return Sight(
        url=without_secrets(url),
        page=text if isinstance(text, Failure) else parse_engines(text),
        version=server_version(answer) if isinstance(answer := about.result(), str) else None,
        readings=readings,
        gpus=() if isinstance(readings, Failure) else _attributed(readings, processes, settings),
        processes=processes,
        served_port=await _served_port(processes, proc),
        daemon_waits_seconds=daemon_waits,
    )


async def fetched(reader: PageReader) -> str | Failure:
    """Return the one page that is wanted of this reader, which is closed."""
    try:
        return await reader.fetch()
    finally:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_SECONDS):
                await reader.close()


async def _gpu_readings() -> GpuReadings | Failure:
    nvml = Nvml(monotonic=time.monotonic, call_timeout_seconds=GPU_TIMEOUT_SECONDS)
    try:
        return await nvml.read(PATIENCE_SECONDS)
    finally:
        await nvml.close()


async def _processes(url: httpx.URL, proc: Path) -> ProcessReadings | Failure:
    return await Processes(engine_port=port_of(url), proc=proc, monotonic=time.monotonic).read(PATIENCE_SECONDS)


def _attributed(readings: GpuReadings, processes: ProcessReadings | Failure, settings: Settings) -> tuple[Gpu, ...]:
    return attribute(AttributionState(), readings, processes, settings.selection)[1]


async def _served_port(processes: ProcessReadings | Failure, proc: Path) -> int | None:
    """Return the one port that the command lines of the engine's processes name."""
    if isinstance(processes, Failure):
        return None

    def ports() -> set[int | None]:
        return {served_port(command(proc, process.pid)) for process in processes.engine} - {None}

    try:
        named = await Worker[set[int | None]]("commands").call(ports, ASIDE_SECONDS)
    except TimeoutError:
        return None
    return named.pop() if len(named) == 1 else None
