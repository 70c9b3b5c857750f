"""Credentials, read from their files where a file that hangs does no harm."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Final

import httpx

from vllm_headroom.model import Failure
from vllm_headroom.scrape.http.credentials import Unusable, bearer_token, trust
from vllm_headroom.scrape.http.failures import failure
from vllm_headroom.scrape.worker import Worker
from vllm_headroom.vocabulary import Reason

_FILE_SECONDS: Final = 1.0
"""Reading takes microseconds; a FIFO without a writer or a network volume may take for ever."""


class CredentialReader:
    """What `token_file` and `ca_file` hold now, read on a thread of its own."""

    def __init__(self, token_file: Path | None, ca_file: Path | None) -> None:
        self._token_file = token_file
        self._ca_file = ca_file
        self._worker: Worker[str | ssl.SSLContext] | None = None

    async def token(self) -> str | Failure | None:
        """Return the token, None where no file is set."""
        file = self._token_file
        if file is None:
            return None
        token = await self._read(lambda: bearer_token(file), f"the token file {file} cannot be read")
        return token if isinstance(token, Failure) else str(token)

    async def trust(self) -> ssl.SSLContext | Failure:
        """Return how to speak TLS: with the CA file's authorities, or those that are trusted by default."""
        file = self._ca_file
        if file is None:
            return httpx.create_ssl_context(trust_env=False)
        context = await self._read(lambda: trust(file), f"the CA file {file} cannot be used")
        assert not isinstance(context, str)  # noqa: S101 - what the worker was given to make
        return context

    def close(self) -> None:
        """Let the thread end; a later reading starts another."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop()

    async def _read(self, function: Callable[[], str | ssl.SSLContext], trouble: str) -> str | ssl.SSLContext | Failure:
        if self._worker is None:
            self._worker = Worker("credentials")
        try:
            return await self._worker.call(function, _FILE_SECONDS)
        except TimeoutError:
            advice = "make it a file that can be read at once"
            return failure(Reason.CREDENTIALS, f"{trouble} (no answer within {_FILE_SECONDS:g} s): {advice}")
        except Unusable as problem:
            return failure(Reason.CREDENTIALS, str(problem))
