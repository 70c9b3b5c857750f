"""What a server is shown and how it is checked: the token and the authorities in their files, which may hang."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Final

import httpx

from vllm_headroom.model import Failure
from vllm_headroom.scrape.http.failures import failure
from vllm_headroom.vocabulary import Reason
from vllm_headroom.worker import Worker

TOKEN: Final = re.compile(r"[\x21-\x7e]+")

TOKEN_BYTES: Final = 64 * 2**10
"""Far more than a token; a file such as /dev/zero never ends."""

_FILE_SECONDS: Final = 1.0
"""Reading takes microseconds; a FIFO without a writer or a network volume may take for ever."""


class UnusableCredentials(Exception):  # noqa: N818 - it says what the file is
    """A file that cannot be used; the message is for the operator."""


def bearer_token(file: Path) -> str:
    """Return the token in a file; raises Unusable."""
    try:
        with file.open("rb") as stream:
            token = stream.read(TOKEN_BYTES).decode("ascii", "replace").strip()
    except OSError as error:
        problem = f"the token file {file} cannot be read ({error.strerror})"
        raise UnusableCredentials(f"{problem}: make it readable for this user") from None
    if not TOKEN.fullmatch(token):
        problem = f"the token file {file} is empty or holds more than a token"
        raise UnusableCredentials(f"{problem}: write one token to it")
    return token


def trust(ca_file: Path | None) -> ssl.SSLContext:
    """Return how a server's certificate is checked, by the usual authorities without a file; raises Unusable."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        problem = f"the CA file {ca_file} cannot be used ({error.strerror or error})"
        raise UnusableCredentials(f"{problem}: make it a readable file of PEM certificates") from None


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
        except UnusableCredentials as problem:
            return failure(Reason.CREDENTIALS, str(problem))
