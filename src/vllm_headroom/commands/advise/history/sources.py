"""The page of a sidecar and the engine's own word, read once over HTTP."""

from __future__ import annotations

import asyncio
from typing import Final
from urllib.parse import urljoin

from msgspec.structs import replace

from vllm_headroom.commands.advise.facts import Facts
from vllm_headroom.commands.advise.history.page import facts_of
from vllm_headroom.commands.advise.settings import EngineArgs, version_of, with_page
from vllm_headroom.commands.terminal import NO_SIDECAR
from vllm_headroom.config.kinds import redacted
from vllm_headroom.daemon.look import fetched, understood
from vllm_headroom.model import Failure
from vllm_headroom.parse.openai import server_version
from vllm_headroom.scrape.http.failures import without_advice
from vllm_headroom.scrape.http.reader import PageReader
from vllm_headroom.trace.errors import BadInput

TIMEOUT_SECONDS: Final = 20.0
"""Longer than the daemon waits: it is asked once, and a busy engine answers late."""


async def sidecar_facts(url: str, settings: EngineArgs) -> Facts:
    """Return what the page of the sidecar at `url` says; raises BadInput where none comes."""
    page = await fetched(_reader(url))
    if isinstance(page, Failure):
        raise BadInput(f"{without_advice(page)}: {NO_SIDECAR}")
    facts = facts_of(page, settings)
    if isinstance(facts, str):
        raise BadInput(facts)
    return facts


async def with_engine(settings: EngineArgs, url: str) -> EngineArgs:
    """Return the settings with what the engine whose page is at `url` says; what the operator told is believed.

    Its version is asked of /version beside the page, which vLLM answers without a key. Raises BadInput where no page
    comes, or it is no engine's.
    """
    page, about = await asyncio.gather(understood(_reader(url)), fetched(_reader(urljoin(url, "version"))))
    if isinstance(page, Failure):
        raise BadInput(f"--engine-url: {without_advice(page)}: check that vLLM serves there")
    if not page.engines:
        raise BadInput(f"--engine-url: the page at {redacted(url)} is not vLLM's")
    told = None if isinstance(about, Failure) else server_version(about)
    version = settings.version or (version_of(told) if told else None)
    return replace(with_page(settings, page), version=version)


def _reader(url: str) -> PageReader:
    return PageReader(url=url, timeout_seconds=TIMEOUT_SECONDS)
