"""The body of an HTTP answer, never larger than it may be."""

from __future__ import annotations

from typing import Final

import httpx

from vllm_headroom.vocabulary import Reason

_PLAIN: Final = frozenset({"", "identity"})


async def read_body(response: httpx.Response, max_bytes: int) -> bytes | Reason:
    """Return the body of a response that is being streamed.

    Never holds more than `max_bytes` of it beside what the event loop reads ahead. Returns MALFORMED for a body that is
    compressed, TOO_LARGE, or INCOMPLETE when the connection or the length promised breaks off.
    """
    if response.headers.get("Content-Encoding", "").strip().lower() not in _PLAIN:
        return Reason.MALFORMED
    body = bytearray()
    try:
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > max_bytes:
                return Reason.TOO_LARGE
    except (httpx.ReadError, httpx.RemoteProtocolError):
        return Reason.INCOMPLETE
    return bytes(body)
