"""How to reach the engine, through the daemon's own reader."""

from __future__ import annotations

from collections.abc import Mapping

import httpx

from vllm_headroom.config.plain import PlainSettings
from vllm_headroom.daemon.look import fetched
from vllm_headroom.daemon.parts import page_reader
from vllm_headroom.daemon.sources import closed
from vllm_headroom.model import Failure
from vllm_headroom.scrape.http.failures import without_secrets
from vllm_headroom.scrape.http.reader import PageReader, Reply
from vllm_headroom.vocabulary import Reason


class Reach:
    """Asks the server that has the engine's page for other things beside it."""

    def __init__(self, settings: PlainSettings) -> None:
        self._settings = settings
        self._page = httpx.URL(settings.engine_url)

    def address(self, path: str) -> str:
        """Return where something is, without what may be secret."""
        return str(without_secrets(self._page.join(path)))

    async def text(self, path: str, seconds: float) -> str | Failure:
        """Return what is served at `path`, which is relative to the engine's page; never raise."""
        answer = await fetched(self._reader(path, seconds))
        return self._told(path, seconds, answer) if isinstance(answer, Failure) else answer

    async def page(self) -> str | Failure:
        """Return the engine's page of metrics; never raise."""
        return await self.text("", self._settings.engine_timeout_seconds)

    async def post(self, path: str, body: Mapping[str, object], seconds: float) -> Reply | Failure:
        """Return what is answered to `body`; never raise."""
        reader = self._reader(path, seconds)
        try:
            answer = await reader.post(body)
        finally:
            await closed(reader)
        return self._told(path, seconds, answer) if isinstance(answer, Failure) else answer

    def _told(self, path: str, seconds: float, failure: Failure) -> Failure:
        """Return a failure to answer in time without the daemon's advice, which is about another time limit."""
        if failure.reason is not Reason.TIMEOUT:
            return failure
        message = f"{self.address(path)} did not answer within {seconds:.3g} s: look whether vLLM hangs, in its log"
        return Failure(source=failure.source, reason=failure.reason, message=message)

    def _reader(self, path: str, seconds: float) -> PageReader:
        return page_reader(self._settings, str(self._page.join(path)), timeout_seconds=seconds)
