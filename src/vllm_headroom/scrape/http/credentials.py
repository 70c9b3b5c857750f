"""The files that say who asks and whom to trust, read where a file that hangs does no harm."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Final

import httpx

from vllm_headroom.model import Failure
from vllm_headroom.scrape.http.failures import failure
from vllm_headroom.scrape.worker import Worker
from vllm_headroom.vocabulary import Reason

_FILE_SECONDS: Final = 1.0
"""Reading takes microseconds; a FIFO without a writer or a network volume may take for ever."""

_TOKEN_BYTES: Final = 64 * 2**10
_TOKEN: Final = re.compile(r"[\x21-\x7e]+")


class Credentials:
    """What `token_file` and `ca_file` hold now, read on a thread of its own while there is one of them."""

    def __init__(self, token_file: Path | None, ca_file: Path | None) -> None:
        self._token_file = token_file
        self._ca_file = ca_file
        self._worker: Worker[str | ssl.SSLContext] | None = None

    async def token(self) -> str | Failure | None:
        """Return the token, None where no file is set."""
        file = self._token_file
        if file is None:
            return None
        try:
            token = str(await self._read(lambda: _start_of(file)))
        except OSError as error:
            problem = f"the token file {file} cannot be read ({_why(error)})"
            return failure(Reason.CREDENTIALS, f"{problem}: make it readable for this user")
        if not _TOKEN.fullmatch(token):
            problem = f"the token file {file} is empty or holds more than a token"
            return failure(Reason.CREDENTIALS, f"{problem}: write one token to it")
        return token

    async def trust(self) -> ssl.SSLContext | Failure:
        """Return how to speak TLS: with the CA file's authorities, or those that are trusted by default."""
        file = self._ca_file
        if file is None:
            return httpx.create_ssl_context(trust_env=False)
        try:
            context = await self._read(lambda: ssl.create_default_context(cafile=file))
        except OSError as error:
            problem = f"the CA file {file} cannot be used ({_why(error)})"
            return failure(Reason.CREDENTIALS, f"{problem}: make it a readable file of PEM certificates")
        assert isinstance(context, ssl.SSLContext)  # noqa: S101 - what the worker was given to make
        return context

    def close(self) -> None:
        """Let the thread end; a later reading starts another."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop()

    async def _read(self, function: Callable[[], str | ssl.SSLContext]) -> str | ssl.SSLContext:
        """Return what the function returns; raise its OSError, of which TimeoutError is one."""
        if self._worker is None:
            self._worker = Worker("credentials")
        return await self._worker.call(function, _FILE_SECONDS)


def _start_of(file: Path) -> str:
    with file.open("rb") as stream:
        return stream.read(_TOKEN_BYTES).decode("ascii", "replace").strip()


def _why(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {_FILE_SECONDS:g} s"
    return error.strerror or str(error)
