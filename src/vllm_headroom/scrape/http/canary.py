"""Asks the engine for one token, to see whether it still answers."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from vllm_headroom.model import Failure
from vllm_headroom.scrape.http.reader import PageReader
from vllm_headroom.vocabulary import Reason

SILENT: Final = frozenset({Reason.TIMEOUT, Reason.INCOMPLETE})
NOT_SERVED: Final = frozenset({Reason.NOT_FOUND, Reason.HTTP_STATUS})
"""How a server answers that has no such path; vLLM has `is_sleeping` in its development mode, as it has sleep."""


class CanaryRequest:
    """One request of the daemon's own, over readers of the server's `health`, `is_sleeping` and `v1/completions`."""

    def __init__(self, *, health: PageReader, sleep: PageReader, completion: PageReader) -> None:
        self._health = health
        self._sleep = sleep
        self._completion = completion

    async def ask(self, model_name: str) -> bool | None:
        """Return whether the engine completes one token; None where that cannot be asked; never raise.

        An engine that sleeps is not asked: its page may be older than its sleep, or, before vLLM 0.11.1, not tell it.
        """
        for reader in (self._health, self._sleep):
            told = await reader.fetch()
            if isinstance(told, Failure) and told.reason not in NOT_SERVED:
                return False if told.reason in SILENT else None
            if isinstance(told, str) and '"is_sleeping":true' in told.replace(" ", ""):
                return None
        return await self._completes(model_name)

    async def close(self) -> None:
        """Let go of the connections."""
        for reader in (self._health, self._sleep, self._completion):
            await reader.close()

    async def _completes(self, model_name: str) -> bool | None:
        answer = await self._completion.post({"model": model_name, "prompt": "1", "max_tokens": 1})
        if isinstance(answer, Failure):
            return False if answer.reason in SILENT else None
        if answer.status == HTTPStatus.OK:
            return True
        return False if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR else None
