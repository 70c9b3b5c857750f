"""One look through the daemon's own readers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import httpx

from vllm_headroom.config.plain import PlainSettings
from vllm_headroom.daemon.look import PATIENCE_SECONDS, Machine, fetched, machine, understood
from vllm_headroom.daemon.parts import page_reader
from vllm_headroom.model import EnginePage, Failure
from vllm_headroom.parse.openai import server_version
from vllm_headroom.scrape.http.failures import without_secrets

ASIDE_SECONDS: Final = 1.0
"""For what only helps: the engine's version."""


class Sight(Machine, frozen=True, kw_only=True):
    """What was seen of the machine and the engine.

    `url` is where the engine's page should be, without user and password. `version` is what the server calls itself,
    None where it does not. `host_limit_bytes` is what the operator says of vLLM's host memory, `daemon_waits_seconds`
    how long the daemon waits for the page, which may be longer than the doctor does.
    """

    url: httpx.URL
    page: EnginePage | Failure
    version: str | None
    daemon_waits_seconds: float
    host_limit_bytes: int | None = None

    @property
    def served_port(self) -> int | None:
        """The port in the command line of the engine that runs here; None where it is not known, or one of several."""
        ports = () if isinstance(self.processes, Failure) else self.processes.ports
        return min(ports) if len(ports) == 1 else None


async def look(settings: PlainSettings, proc: Path, sys: Path) -> Sight:
    """Read the engine's page, the GPUs and `proc` once, as the daemon does with these settings."""
    url = httpx.URL(settings.engine_url)
    daemon_waits = min(settings.engine_timeout_seconds, settings.sample_interval_seconds)
    reader = page_reader(settings, str(url), timeout_seconds=min(daemon_waits, PATIENCE_SECONDS))
    page = asyncio.create_task(understood(reader, settings.profile))
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
        daemon_waits_seconds=daemon_waits,
        host_limit_bytes=settings.host_memory_limit_bytes,
    )
