"""Explain to the operator why an engine's page could not be fetched."""

import os
import re
import socket
import ssl
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Final

import httpx

from vllm_headroom.model import Failure
from vllm_headroom.scrape.shortage import SHORTAGES, build_unavailable
from vllm_headroom.text_file import read_file
from vllm_headroom.vocabulary import Reason, Source

_MAX_LOCATION_CHARACTERS: Final = 200
"""The maximum length of a redirect's target in a message. A header can be 100 kB long."""


_STATUS_REASONS: Final[Mapping[int, Reason]] = {
    HTTPStatus.UNAUTHORIZED: Reason.UNAUTHORIZED,
    HTTPStatus.FORBIDDEN: Reason.UNAUTHORIZED,
    HTTPStatus.NOT_FOUND: Reason.NOT_FOUND,
}
_BROKEN_PAGE_ADVICE: Final = (
    "check with df whether its PROMETHEUS_MULTIPROC_DIR is full, gone or on a network volume, and"
    " look at the engine's log; requests are served without it, so this is no reason for a restart"
)
"""The advice if an otherwise healthy server responds with status 500 (vllm-project/vllm#49983)."""

_ADVICE: Final = {
    Reason.UNAUTHORIZED: "set HEADROOM_ENGINE_BEARER_TOKEN_FILE to a token that may read the page",
    Reason.NOT_FOUND: "correct HEADROOM_ENGINE_URL, vLLM serves its metrics at /metrics",
    Reason.REDIRECT: "set HEADROOM_ENGINE_URL to the address of the page itself",
    Reason.HTTP_STATUS: "look for the cause in the engine's log",
    Reason.MALFORMED: "make it send the page uncompressed",
    Reason.TOO_LARGE: "check that it is vLLM's, or raise HEADROOM_ENGINE_MAX_PAGE_BYTES",
    Reason.OUT_OF_BOUNDS: "check that it is vLLM's, and what stands before it",
    Reason.INCOMPLETE: (
        "check that HEADROOM_ENGINE_URL names vLLM's own port, and https only if it serves that"
    ),
    Reason.TIMEOUT: "check whether vLLM hangs, or raise HEADROOM_ENGINE_TIMEOUT_SECONDS",
    Reason.CREDENTIALS: "correct HEADROOM_ENGINE_HEADERS",
    Reason.NAME_RESOLUTION: "correct the host in HEADROOM_ENGINE_URL, or the resolver",
    Reason.TLS: (
        "set HEADROOM_ENGINE_CA_FILE to the authority that signed its certificate, or use http"
    ),
    Reason.UNREACHABLE: "check that vLLM runs and that HEADROOM_ENGINE_URL names its host and port",
}


_HUNG_UP: Final = "hung up or broke HTTP before it answered"


def build_failure(
    reason: Reason, problem: str, advice: str | None = None, *, http_status: int | None = None
) -> Failure:
    """Return a failure of the engine; `advice` replaces the usual advice for this reason."""
    return Failure(
        source=Source.ENGINE,
        reason=reason,
        message=f"{problem}: {advice or _ADVICE[reason]}",
        http_status=http_status,
    )


def strip_advice(failure: Failure) -> str:
    """Return a failure's message without the advice on the daemon's settings."""
    return failure.message.rpartition(": ")[0]


def hide_secrets(url: httpx.URL) -> httpx.URL:
    """Return the URL without user, password and fragment, and with `***` as its query."""
    return url.copy_with(userinfo=b"", query=b"***" if url.query else None, fragment=None)


def describe_answer(response: httpx.Response, url: str) -> str:
    """Return a clause such as "URL answers 404 Not Found".

    The standard phrase for the status is used. The server's phrase may contain a secret.
    """
    phrase = httpx.codes.get_reason_phrase(response.status_code)
    return f"{url} answers {response.status_code} {phrase}".strip()


def explain_status(response: httpx.Response, url: str) -> Failure:
    """Return the failure for a response with a status other than 200.

    Raises httpx.InvalidURL if the target of a redirect is not a URL.
    """
    answer = describe_answer(response, url)
    reason = _STATUS_REASONS.get(response.status_code, Reason.HTTP_STATUS)
    # A redirect usually leads to a login page. The message contains the page's URL, so that the
    # operator can see this.
    if reason is Reason.HTTP_STATUS and response.has_redirect_location:
        target = hide_secrets(httpx.URL(response.headers["Location"]))
        location = str(target)[:_MAX_LOCATION_CHARACTERS]
        return build_failure(Reason.REDIRECT, f"{answer}, a redirect to {location}")
    advice = None
    if response.status_code == HTTPStatus.INTERNAL_SERVER_ERROR:
        advice = _BROKEN_PAGE_ADVICE
    return build_failure(reason, answer, advice, http_status=response.status_code)


def explain_broken_body(reason: Reason, url: str, max_bytes: int) -> Failure:
    """Return the failure for a body that could not be read; `reason` comes from `read_body`."""
    if reason is Reason.INCOMPLETE:
        return build_failure(
            reason, f"{url} broke off its page", "if it stays so, look for a proxy that cuts it"
        )
    problems = {
        Reason.MALFORMED: f"{url} answers in an encoding that was not asked for",
        Reason.TOO_LARGE: f"the page at {url} is larger than {max_bytes} bytes",
        Reason.OUT_OF_BOUNDS: f"{url} sends its page in parts so small that they cost too much CPU",
    }
    return build_failure(reason, problems[reason])


def explain_no_answer(error: Exception, url: str, timeout_seconds: float) -> Failure:
    """Return the failure for a request that raised `error`, from httpx or the operating system."""
    match error:
        case TimeoutError() | httpx.TimeoutException():
            return build_failure(
                Reason.TIMEOUT, f"{url} sent no complete page within {timeout_seconds:g} s"
            )
        # These errors quote the received bytes or the header. The quote may contain a secret, so
        # the text of these errors is omitted.
        case httpx.LocalProtocolError():
            return build_failure(Reason.CREDENTIALS, f"HTTP cannot carry a header set for {url}")
        case httpx.RemoteProtocolError() | httpx.InvalidURL():
            return build_failure(Reason.INCOMPLETE, f"{url} {_HUNG_UP}")
    return _explain_no_connection(error, url)


def _explain_no_connection(error: Exception, url: str) -> Failure:
    """Return the failure for a connection that was refused or broken.

    The first known exception in the chain of causes determines the reason. If no exception in the
    chain is known, the reason is UNREACHABLE.
    """
    is_connecting = isinstance(error, httpx.ConnectError)
    cause: BaseException | None = error
    # httpx wraps httpcore's error, which wraps the socket's error.
    while cause is not None:
        match cause:
            case socket.gaierror() | UnicodeError():
                return build_failure(
                    Reason.NAME_RESOLUTION, f"the host of {url} cannot be resolved ({cause})"
                )
            case ssl.SSLError():
                return build_failure(Reason.TLS, f"TLS with {url} failed ({cause})")
            # While connecting, a reset means that nothing is listening on the port. Later, it means
            # that the server hung up.
            case ConnectionResetError() | BrokenPipeError() if not is_connecting:
                return build_failure(Reason.INCOMPLETE, f"{url} {_HUNG_UP}")
            case OSError(errno=int(number)) if number in SHORTAGES:
                return build_unavailable(Source.ENGINE, f"{url} cannot be asked", cause)
            case OSError(errno=int(number)):
                return build_failure(
                    Reason.UNREACHABLE, f"no connection to {url} ({os.strerror(number)})"
                )
        cause = cause.__cause__ or cause.__context__
    return build_failure(Reason.UNREACHABLE, f"no connection to {url} ({type(error).__name__})")


TOKEN: Final = re.compile(r"[\x21-\x7e]+")
"""Visible ASCII characters, without spaces."""

MAX_TOKEN_FILE_BYTES: Final = 64 * 2**10
"""The maximum number of bytes read from a token file. A file such as /dev/zero never ends. A token
is much shorter.
"""


class UnusableCredentials(Exception):  # noqa: N818 - the name describes the file
    """A token or CA file cannot be used; the message is for the operator."""


def name_token_file(file: Path) -> str:
    """Return the name by which a message refers to a token file.

    A name that is not an absolute path is hidden, because it may be the token itself.
    """
    if file.is_absolute():
        return f"the token file {file}"
    return "the token file (its name is hidden, since it is no absolute path)"


def read_token(file: Path) -> str:
    """Return the token in a file.

    Raises UnusableCredentials if the file cannot be read or does not contain exactly one token.
    """
    try:
        # A non-ASCII byte becomes a character that cannot occur in a token.
        token = read_file(file, MAX_TOKEN_FILE_BYTES).decode("ascii", "replace").strip()
    except OSError as error:
        problem = f"{name_token_file(file)} cannot be read ({error.strerror})"
        raise UnusableCredentials(f"{problem}: make it readable for this user") from None
    if not TOKEN.fullmatch(token):
        problem = f"{name_token_file(file)} is empty or holds more than a token"
        raise UnusableCredentials(f"{problem}: write one token to it")
    return token


def load_trust(ca_file: Path | None) -> ssl.SSLContext:
    """Return a client TLS context that trusts the authorities in the file.

    If the file is None, the context trusts the machine's authorities and those from certifi. The
    certificate's chain, name and validity period are verified as in Go and curl. Raises
    UnusableCredentials if the file cannot be read or does not contain a certificate.
    """
    try:
        if ca_file is None:
            context = httpx.create_ssl_context(trust_env=False)
            context.load_default_certs()
        else:
            context = ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        problem = f"the CA file {ca_file} cannot be used ({error.strerror or error})"
        raise UnusableCredentials(
            f"{problem}: make it a readable file of PEM certificates"
        ) from None
    # Python 3.13 and newer set this flag. The flag rejects certificate authorities without key
    # usage or key identifiers, such as those of EKS clusters and many companies.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    # Python 3.13 and newer set this flag. With it, the file may contain only an intermediate
    # authority.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
