"""Explain to the operator why an engine's page did not come."""

import os
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx

from vllm_headroom.model import Failure
from vllm_headroom.scrape.shortage import SHORTAGES, build_unavailable
from vllm_headroom.vocabulary import Reason, Source
from vllm_headroom.worker import Worker

T = TypeVar("T")
_LOCATION_CHARACTERS: Final = 200
"""Enough for an address worth following; a header can be 100 kB long."""


def build_failure(reason: Reason, message: str) -> Failure:
    """Return the engine's failure."""
    return Failure(source=Source.ENGINE, reason=reason, message=message)


def strip_advice(failed: Failure) -> str:
    """Return the problem without the advice, where the engine's settings do not apply."""
    return failed.message.rpartition(": ")[0]


def hide_secrets(url: httpx.URL) -> httpx.URL:
    """Return the URL without user and password, and with stars for a query, which may hold a token."""
    return url.copy_with(userinfo=b"", query=b"***" if url.query else None, fragment=None)


def explain_status(response: httpx.Response, url: str) -> Failure:
    """Return the failure of a status other than 200."""
    answer = f"{url} answers {response.status_code} {response.reason_phrase}".strip()
    match response.status_code:
        case HTTPStatus.UNAUTHORIZED | HTTPStatus.FORBIDDEN:
            advice = "set HEADROOM_ENGINE_BEARER_TOKEN_FILE to a token that may read the page"
            return build_failure(Reason.UNAUTHORIZED, f"{answer}: {advice}")
        case HTTPStatus.NOT_FOUND:
            advice = "correct HEADROOM_ENGINE_URL, vLLM serves its metrics at /metrics"
            return build_failure(Reason.NOT_FOUND, f"{answer}: {advice}")
    if response.has_redirect_location:
        advice = "set HEADROOM_ENGINE_URL to the address of the page itself"
        return build_failure(Reason.REDIRECT, f"{answer}, a redirect to {_read_location(response)}: {advice}")
    return build_failure(Reason.HTTP_STATUS, f"{answer}: look for the cause in the engine's log")


def explain_broken_body(reason: Reason, url: str, max_bytes: int) -> Failure:
    """Return the failure of a body that could not be read to its end."""
    messages = {
        Reason.MALFORMED: f"{url} answers in an encoding that was not asked for: make it send the page uncompressed",
        Reason.TOO_LARGE: (
            f"the page at {url} is larger than {max_bytes} bytes:"
            " check that it is vLLM's, or raise HEADROOM_ENGINE_MAX_PAGE_BYTES"
        ),
        Reason.OUT_OF_BOUNDS: (
            f"{url} sends its page in parts so small that they cost too much CPU:"
            " check that it is vLLM's, and what stands before it"
        ),
        Reason.INCOMPLETE: f"{url} broke off its page: if it stays so, look for a proxy that cuts it",
    }
    return build_failure(reason, messages[reason])


def explain_no_answer(error: Exception, url: str, timeout_seconds: float) -> Failure:
    """Return the failure of a request that raised `error`, of httpx or the operating system."""
    match error:
        case TimeoutError() | httpx.TimeoutException():
            advice = "check whether vLLM hangs, or raise HEADROOM_ENGINE_TIMEOUT_SECONDS"
            return build_failure(Reason.TIMEOUT, f"{url} sent no complete page within {timeout_seconds:g} s: {advice}")
        case httpx.LocalProtocolError():  # its text quotes the header, which may be a secret
            return build_failure(
                Reason.CREDENTIALS, f"HTTP cannot carry a header set for {url}: correct HEADROOM_ENGINE_HEADERS"
            )
        case httpx.RemoteProtocolError() | httpx.InvalidURL():  # its text quotes what was received
            advice = "check that HEADROOM_ENGINE_URL names vLLM's own port, and https only if it serves that"
            return build_failure(Reason.INCOMPLETE, f"{url} hung up or broke HTTP before it answered: {advice}")
    return _explain_no_connection(error, url)


def _explain_no_connection(error: Exception, url: str) -> Failure:
    for cause in _walk_causes(error):
        match cause:
            case socket.gaierror():
                advice = "correct the host in HEADROOM_ENGINE_URL, or the resolver"
                return build_failure(
                    Reason.NAME_RESOLUTION, f"the host of {url} cannot be resolved ({cause}): {advice}"
                )
            case ssl.SSLError():
                advice = "set HEADROOM_ENGINE_CA_FILE to the authority that signed its certificate, or use http"
                return build_failure(Reason.TLS, f"TLS with {url} failed ({cause}): {advice}")
            case OSError(errno=int(number)) if number in SHORTAGES:
                return build_unavailable(Source.ENGINE, f"{url} cannot be asked", cause)
            case OSError(errno=int(number)):
                return _explain_unreachable(url, os.strerror(number))
    return _explain_unreachable(url, type(error).__name__)


def _explain_unreachable(url: str, problem: str) -> Failure:
    advice = "check that vLLM runs and that HEADROOM_ENGINE_URL names its host and port"
    return build_failure(Reason.UNREACHABLE, f"no connection to {url} ({problem}): {advice}")


def _walk_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its causes: httpx wraps httpcore, which wraps anyio, which groups its attempts."""
    while error is not None:
        yield error
        error = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__ or error.__context__


def _read_location(response: httpx.Response) -> str:
    try:
        return str(hide_secrets(httpx.URL(response.headers["Location"])))[:_LOCATION_CHARACTERS]
    except httpx.InvalidURL as error:
        raise httpx.RemoteProtocolError("redirects to what is no address") from error


TOKEN: Final = re.compile(r"[\x21-\x7e]+")

TOKEN_BYTES: Final = 64 * 2**10
"""Far more than a token; a file such as /dev/zero never ends."""

_FILE_SECONDS: Final = 1.0
"""Reading takes microseconds; a FIFO without a writer or a network volume may take for ever."""


class UnusableCredentials(Exception):  # noqa: N818 - the name describes the file
    """A file that cannot be used; the message is for the operator."""


def read_token(file: Path) -> str:
    """Return the token in a file; raises UnusableCredentials."""
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


def load_trust(ca_file: Path | None) -> ssl.SSLContext:
    """Return a TLS context with the file's authorities, without a file the default ones; raises UnusableCredentials."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        problem = f"the CA file {ca_file} cannot be used ({error.strerror or error})"
        raise UnusableCredentials(f"{problem}: make it a readable file of PEM certificates") from None


class CredentialReader:
    """Reads `token_file` and `ca_file` on a separate thread."""

    def __init__(self, token_file: Path | None, ca_file: Path | None) -> None:
        self._token_file = token_file
        self._ca_file = ca_file
        self._worker: Worker[Any] | None = None

    async def token(self) -> str | Failure | None:
        """Return the token, None where no file is set."""
        file = self._token_file
        if file is None:
            return None
        return await self._read(lambda: read_token(file), f"the token file {file} cannot be read")

    async def trust(self) -> ssl.SSLContext | Failure:
        """Return the TLS context: with the CA file's authorities, or the default ones."""
        file = self._ca_file
        if file is None:
            return httpx.create_ssl_context(trust_env=False)
        return await self._read(lambda: load_trust(file), f"the CA file {file} cannot be used")

    def close(self) -> None:
        """Stop the thread; a later reading starts another."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop()

    async def _read(self, function: Callable[[], T], trouble: str) -> T | Failure:
        if self._worker is None:
            self._worker = Worker("credentials")
        try:
            found: T = await self._worker.call(function, _FILE_SECONDS)
        except TimeoutError:
            advice = "make it a file that can be read at once"
            return build_failure(Reason.CREDENTIALS, f"{trouble} (no answer within {_FILE_SECONDS:g} s): {advice}")
        except UnusableCredentials as problem:
            return build_failure(Reason.CREDENTIALS, str(problem))
        return found
