"""The body of an HTTP answer, whatever its encoding, never larger than it may be."""

from __future__ import annotations

import zlib
from typing import Final, Protocol

import httpx

from vllm_headroom.vocabulary import Reason

_GZIP: Final = 16 + zlib.MAX_WBITS
"""zlib's window argument that makes it expect a gzip header."""


class _Decoder(Protocol):
    """What zlib's decompressor is."""

    @property
    def eof(self) -> bool:
        """Tell whether the data may end here."""

    @property
    def unused_data(self) -> bytes:
        """Return what follows the end."""

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        """Return at most `max_length` bytes."""


class _Identity:
    """Lets bytes through; the connection knows where they end."""

    eof = True
    unused_data = b""

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        """Return the first `max_length` bytes."""
        return data[:max_length]


async def read_body(response: httpx.Response, max_bytes: int) -> bytes | Reason:
    """Return the decoded body of a response that is being streamed.

    Never holds more than `max_bytes` of it beside what the event loop reads ahead; httpx's own
    decoder would inflate whatever one read of 64 KiB contains: 64 MiB. Returns MALFORMED for an encoding other than
    gzip, TOO_LARGE, or INCOMPLETE when the connection, the gzip stream or the length promised breaks off.
    """
    decoder = _decoder(response)
    if decoder is None:
        return Reason.MALFORMED
    body = bytearray()
    try:
        async for chunk in response.aiter_raw():
            body += decoder.decompress(chunk, max_bytes + 1 - len(body))
            if len(body) > max_bytes:
                return Reason.TOO_LARGE
            if decoder.unused_data:
                return Reason.INCOMPLETE
    except (httpx.ReadError, httpx.RemoteProtocolError, zlib.error):
        return Reason.INCOMPLETE
    return bytes(body) if decoder.eof else Reason.INCOMPLETE


def _decoder(response: httpx.Response) -> _Decoder | None:
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    if encoding in {"", "identity"}:
        return _Identity()
    return zlib.decompressobj(_GZIP) if encoding == "gzip" else None
