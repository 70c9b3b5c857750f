"""Range queries over a time span, sent to a Prometheus server."""

import json
import math
import ssl
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import httpx
from msgspec import Struct

from vllm_headroom.scrape.http.failures import (
    UnusableCredentials,
    describe_answer,
    explain_no_answer,
    load_trust,
    read_token,
    strip_advice,
)
from vllm_headroom.units import MIB, format_size
from vllm_headroom.vocabulary import Reason
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.openai import parse_object

_TIMEOUT: Final = httpx.Timeout(150.0, connect=10.0)
"""Prometheus cancels a query after two minutes (--query.timeout). This timeout is longer, so that
Prometheus can report its error first.
"""

_LONGEST_TEXT: Final = 300
"""Our choice: the maximum number of characters that an error message quotes from external text."""

_MOST_BYTES: Final = 128 * MIB
"""The maximum size of a decompressed response. For 8 GPUs and their engine, a page takes 5 MB. The
step is then 15 s.
"""

_ENCODINGS: Final = frozenset({"", "identity", "gzip"})
"""The supported content encodings of a response.

Responses are read in chunks of 64 KiB. Gzip expands a chunk to at most 64 MiB. Nested gzip could
expand it to any size.
"""

_LESS: Final = "ask for less, by a larger --step or a narrower --match"
_ADVICE: Final = {
    Reason.TIMEOUT: _LESS,
    Reason.TLS: "give its CA with --ca-file, or use http",
    Reason.INCOMPLETE: "check the port, and https if it serves that",
}


class Series(Struct, frozen=True, kw_only=True):
    """One series in a response."""

    name: str

    labels: dict[str, str]
    """The labels without the metric name."""

    values: dict[int, float]
    """The finite values, by time in milliseconds since the epoch."""


class TimeSpan(Struct, frozen=True, kw_only=True):
    """Evenly spaced times starting at `start_ms`, in milliseconds since the epoch.

    `end_ms` itself is included if it falls on a step; no time is after `end_ms`.
    """

    start_ms: int
    end_ms: int
    step_ms: int

    def times(self) -> range:
        """Return every time of the span."""
        return range(self.start_ms, self.end_ms + 1, self.step_ms)

    def pages(self, most_steps: int) -> "list[TimeSpan]":
        """Split the span into parts of at most `most_steps` times each.

        Each time is in exactly one part.
        """
        # The server rejects queries with more than `most_steps` steps.
        stride = max(1, most_steps) * self.step_ms
        starts = range(self.start_ms, self.end_ms + 1, stride)
        return [
            TimeSpan(
                start_ms=start,
                end_ms=min(start + stride - self.step_ms, self.end_ms),
                step_ms=self.step_ms,
            )
            for start in starts
        ]


Time = tuple[bool, float]
"""Whether a time is relative to now, and its seconds. The seconds count from now or from the epoch.
"""


def build_span(start: Time | None, end: Time, step_seconds: float, now_seconds: float) -> TimeSpan:
    """Build the span of --start, --end and --step.

    Raises BadInput if the start is missing or is not before the end.
    """
    if start is None:
        raise BadInput(
            "--from-prometheus needs --start: a time such as 2026-01-31T08:00:00Z, or -24h"
        )
    start_ms = _count_ms(start, now_seconds)
    end_ms = _count_ms(end, now_seconds)
    if not 0 <= start_ms < end_ms:
        raise BadInput("--start is not a time before --end")
    return TimeSpan(start_ms=start_ms, end_ms=end_ms, step_ms=round(step_seconds * 1000))


def _count_ms(time: Time, now_seconds: float) -> int:
    """Return a time as milliseconds since the epoch."""
    is_relative, seconds = time
    if is_relative:
        seconds += now_seconds
    return round(seconds * 1000)


class PrometheusApi:
    """The HTTP API of a Prometheus server, or of a compatible one, at `url`.

    The token in `bearer_token_file` replaces the user and password in the URL. `ca_file` replaces
    the default CAs. Raises BadInput if the token or the CAs cannot be used. `shown` is the URL
    without user and password.
    """

    def __init__(
        self, url: httpx.URL, *, bearer_token_file: Path | None = None, ca_file: Path | None = None
    ) -> None:
        base = url.copy_with(query=None, fragment=None)
        # The URL for messages, which must not contain a password.
        self.shown = str(base.copy_with(userinfo=b""))
        self._address = base.copy_with(path=base.path.rstrip("/") + "/api/v1/query_range")
        headers = {"User-Agent": "vllm-headroom", "Accept-Encoding": "gzip"}
        try:
            if bearer_token_file is not None:
                headers["Authorization"] = f"Bearer {read_token(bearer_token_file)}"
                # With a user in the URL, httpx would send the URL's user and password instead of
                # our header.
                self._address = self._address.copy_with(userinfo=b"")
            verify = load_trust(ca_file)
        except UnusableCredentials as error:
            raise BadInput(str(error)) from None
        self._client = httpx.Client(verify=verify, timeout=_TIMEOUT, headers=headers)

    def query_range(self, expression: str, span: TimeSpan) -> list[Series]:
        """Return the series of a PromQL `expression` over the span; the list may be empty.

        Raises BadInput if the server does not respond with a complete result.
        """
        form = {
            "query": expression,
            "start": f"{span.start_ms / 1000:.3f}",
            "end": f"{span.end_ms / 1000:.3f}",
            "step": f"{span.step_ms / 1000:.3f}",
        }
        body = bytearray()
        try:
            with self._client.stream("POST", self._address, data=form) as response:
                if response.headers.get("Content-Encoding", "").strip().lower() not in _ENCODINGS:
                    raise httpx.DecodingError("it is not gzip")
                for part in response.iter_bytes():
                    body += part
                    if len(body) > _MOST_BYTES:
                        most = format_size(_MOST_BYTES)
                        raise BadInput(
                            f"{self.shown} answers a query with more than {most}: {_LESS}"
                        )
        except (httpx.HTTPError, ssl.SSLError) as error:
            if isinstance(error, httpx.DecodingError):
                unpacked = f"the answer of {self.shown} cannot be unpacked ({_shorten(error)})"
                raise BadInput(f"{unpacked}: check the proxy in front of it") from error
            failed = explain_no_answer(error, self.shown, _TIMEOUT.read or 0.0)
            advice = _ADVICE.get(failed.reason, "check that it runs there")
            raise BadInput(f"{strip_advice(failed)}: {advice}") from error
        return self._parse_answer(response, bytes(body))

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _parse_answer(self, response: httpx.Response, body: bytes) -> list[Series]:
        """Return the series in a response; raise BadInput for an error or a partial result."""
        answer = parse_object(body)
        if response.status_code != HTTPStatus.OK or answer.get("status") != "success":
            raise BadInput(self._explain_refusal(response, answer))
        if warnings := answer.get("warnings"):
            raise BadInput(
                f"{self.shown} has only part of this history: {_shorten(json.dumps(warnings))}"
            )
        try:
            return [_parse_series(row) for row in answer["data"]["result"]]
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            # These errors are raised if the JSON has a different structure.
            raise BadInput(
                f"{self.shown} does not answer a range query with a range: check that it is"
                " Prometheus"
            ) from None

    def _explain_refusal(self, response: httpx.Response, answer: Mapping[str, Any]) -> str:
        """Describe an error response in one line, with advice."""
        answered = describe_answer(response, self.shown)
        if answer.get("status") == "error":
            return f"{answered} to a query: {_shorten(answer.get('error'))}"
        match response.status_code:
            case HTTPStatus.UNAUTHORIZED | HTTPStatus.FORBIDDEN:
                return f"{answered}: give a token with the right to query by --bearer-token-file"
            case (
                HTTPStatus.TOO_MANY_REQUESTS
                | HTTPStatus.BAD_GATEWAY
                | HTTPStatus.SERVICE_UNAVAILABLE
            ):
                return f"{answered}: it is overloaded or starting, try again later"
        if response.has_redirect_location:
            return (
                f"{answered}, a redirect to a login or another address: give the address of"
                " Prometheus itself"
            )
        return (
            f"{answered} and not as Prometheus does: --from-prometheus takes the URL in front of"
            " /api/v1/query_range"
        )


def _parse_series(row: Mapping[str, Any]) -> Series:
    """Parse one series in a response, without values that are not finite.

    Raises KeyError, TypeError, ValueError, AttributeError or OverflowError if the JSON has a
    different structure.
    """
    labels = dict(row["metric"])
    values: dict[int, float] = {}
    for seconds, text in row["values"]:
        time_ms = round(float(seconds) * 1000)
        value = float(text)
        if math.isfinite(value):
            values[time_ms] = value
    return Series(name=labels.pop("__name__", ""), labels=labels, values=values)


def _shorten(text: object) -> str:
    """Return the beginning of an external text as a single line."""
    return " ".join(str(text).split())[:_LONGEST_TEXT]
