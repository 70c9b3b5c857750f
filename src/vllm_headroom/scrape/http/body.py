"""The body of an HTTP answer, never larger than it may be."""

from __future__ import annotations

from typing import Final

import httpx

from vllm_headroom.vocabulary import Reason

_PLAIN: Final = frozenset({"", "identity"})

_LEAST_PART_BYTES: Final = 512
"""Of what comes at once, on the average: a packet carries more, and each part takes 40 us, be it of one byte."""

_FREE_PARTS: Final = 256
"""How many may be smaller all the same: a server that sends its page line by line is none that means harm."""


async def read_body(response: httpx.Response, max_bytes: int) -> bytes | Reason:
    """Return the body of a response that is being streamed.

    Never holds more than `max_bytes` of it beside what the event loop reads ahead. Returns MALFORMED for a body that is
    compressed, TOO_LARGE, OUT_OF_BOUNDS for one in so many pieces that nothing else would have its turn, or INCOMPLETE
    when the connection or the length promised breaks off.
    """
    if response.headers.get("Content-Encoding", "").strip().lower() not in _PLAIN:
        return Reason.MALFORMED
    body, parts = bytearray(), 0
    try:
        async for part in response.aiter_raw():
            body += part
            parts += 1
            if len(body) > max_bytes:
                return Reason.TOO_LARGE
            if parts > _FREE_PARTS + len(body) / _LEAST_PART_BYTES:
                return Reason.OUT_OF_BOUNDS
    except (httpx.ReadError, httpx.RemoteProtocolError):
        return Reason.INCOMPLETE
    return bytes(body)
