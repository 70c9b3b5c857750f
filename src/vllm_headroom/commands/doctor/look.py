"""One look through the daemon's own readers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import httpx

from vllm_headroom.config.plain import PlainSettings
from vllm_headroom.daemon.look import PATIENCE_SECONDS, Machine, fetched, machine
from vllm_headroom.daemon.parts import page_reader
from vllm_headroom.model import EnginePage, Failure, ProcessReadings
from vllm_headroom.parse.openai import server_version
from vllm_headroom.parse.page import parse_engines
from vllm_headroom.scrape.http.failures import without_secrets
from vllm_headroom.scrape.proc.files import command
from vllm_headroom.scrape.proc.servers import served_port
from vllm_headroom.worker import Worker

ASIDE_SECONDS: Final = 1.0
"""For what only helps: the engine's version, and the port in its command line."""


class Sight(Machine, frozen=True, kw_only=True):
    """What was seen of the machine and the engine.

    `url` is where the engine's page should be, without user and password. `version` is what the server calls itself,
    None where it does not. `served_port` is the port in the command line of the engine that runs here, None where it is
    not known. `host_limit_bytes` is what the operator says of vLLM's host memory. `daemon_waits_seconds` is how long
    the daemon waits for the page, which may be longer than the doctor.
    """

    url: httpx.URL
    page: EnginePage | Failure
    version: str | None
    served_port: int | None
    daemon_waits_seconds: float
    host_limit_bytes: int | None = None


async def look(settings: PlainSettings, proc: Path, sys: Path) -> Sight:
    """Read the engine's page, the GPUs and `proc` once, as the daemon does with these settings."""
    url = httpx.URL(settings.engine_url)
    daemon_waits = min(settings.engine_timeout_seconds, settings.sample_interval_seconds)
    page = asyncio.create_task(_page(settings, str(url), min(daemon_waits, PATIENCE_SECONDS)))
    here, about = await asyncio.gather(
        machine(settings, page, proc, sys),
        fetched(page_reader(settings, str(url.join("version")), timeout_seconds=ASIDE_SECONDS)),
    )
    return Sight(
        url=without_secrets(url),
        page=await page,
        version=server_version(about) if isinstance(about, str) else None,
        readings=here.readings,
        gpus=here.gpus,
        processes=here.processes,
        served_port=await _served_port(here.processes, proc),
        daemon_waits_seconds=daemon_waits,
        host_limit_bytes=settings.host_memory_limit_bytes,
    )


async def _page(settings: PlainSettings, url: str, timeout_seconds: float) -> EnginePage | Failure:
    text = await fetched(page_reader(settings, url, timeout_seconds=timeout_seconds))
    return text if isinstance(text, Failure) else parse_engines(text, settings.profile)


async def _served_port(processes: ProcessReadings | Failure, proc: Path) -> int | None:
    """Return the one port that the command lines of the engine's processes name, or those of others without any."""
    if isinstance(processes, Failure):
        return None

    pids = [process.pid for process in processes.engine] or [pid for pid, _ in processes.neighbours]

    def ports() -> set[int | None]:
        return {served_port(command(proc, pid)) for pid in pids} - {None}

    try:
        named = await Worker[set[int | None]]("commands").call(ports, ASIDE_SECONDS)
    except TimeoutError:
        return None
    return named.pop() if len(named) == 1 else None
