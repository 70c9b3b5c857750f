"""The page of metrics: written once per sample and format, with the age of the sample put in at the scrape."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import Final
from urllib.parse import parse_qs

from msgspec import Struct
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from vllm_headroom import catalog
from vllm_headroom.expose.answers import NO_SNIFF, NO_STORE, Header, Request, Response
from vllm_headroom.expose.collector import HeadroomCollector, registry
from vllm_headroom.model import Published

Encode = Callable[[Collector], bytes]

_AGE: Final = f"\n{catalog.SAMPLE_AGE.name} ".encode()
_GZIP_HEAD: Final = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
_LAST_BLOCK: Final = b"\x01\x00\x00\xff\xff"
_WINDOW_BITS: Final = -14
_MEMORY_LEVEL: Final = 7
"""Enough for a page, and below the size at which each compressor's memory would be mapped anew: 10 us instead of 35."""

_ZERO: Final = re.compile(r"q\s*=\s*0(\.0*)?")
_MOST_FORMATS: Final = 3
"""Formats kept of one sample: there are two, and a version and an escaping scheme that a scraper may make up. Each
takes 8 MiB of the largest page that an engine's names can make."""

_HEADERS: Final[tuple[Header, ...]] = (NO_SNIFF, NO_STORE, ("Vary", "Accept, Accept-Encoding"))
_GZIP_HEADERS: Final = (*_HEADERS, ("Content-Encoding", "gzip"))


class _Part(Struct, frozen=True):
    """Bytes of the page that stay the same, plain and as blocks of a deflate stream."""

    plain: bytes
    deflated: bytes


class MetricsPage:
    """Answers /metrics with what the collector has to show now."""

    def __init__(self, collector: HeadroomCollector) -> None:
        self._collector = collector
        self._registry = registry(collector)
        self._shown: Published | None = None
        self._formats: dict[str, tuple[_Part, ...]] = {}

    def __call__(self, request: Request) -> Response:
        """Return the page, or the families of it that the query names, in the format and encoding asked for."""
        accept = request.headers.get("accept", "")
        if names := parse_qs(request.query).get("name[]"):
            encode, content_type = _encoder(accept)
            body = encode(self._registry.restricted_registry(names))
            return Response(status=200, body=body, content_type=content_type, headers=_HEADERS)
        content_type, parts = self._parts(accept)
        if _takes_gzip(request.headers.get("accept-encoding", "")):
            return Response(status=200, body=_gzip(parts), content_type=content_type, headers=_GZIP_HEADERS)
        body = b"".join(part.plain for part in parts)
        return Response(status=200, body=body, content_type=content_type, headers=_HEADERS)

    def _parts(self, accept: str) -> tuple[str, tuple[_Part, ...]]:
        encode, content_type = _encoder(accept)
        published = self._collector.published()
        if published is not self._shown or len(self._formats) > _MOST_FORMATS:
            self._shown, self._formats = published, {}
        if content_type not in self._formats:
            self._formats[content_type] = _split(encode(self._registry))
        before, *after = self._formats[content_type]
        if published is None or not after:
            return content_type, (before, *after)
        age = f"{self._collector.age_seconds(published)!r}\n"
        return content_type, (before, _stored(age.encode()), *after)


@lru_cache(maxsize=_MOST_FORMATS)
def _encoder(accept: str) -> tuple[Encode, str]:
    """Return the format that a header asks for; the usual one where it asks in a way that no answer could repeat."""
    try:
        return choose_encoder(accept if accept.isascii() else "")
    except TypeError:  # a version that is none, such as 1.0.0-beta, which the library cannot compare
        return choose_encoder("")


def _split(page: bytes) -> tuple[_Part, ...]:
    """Return the page in two parts: up to the sample's age, and from the line after it."""
    before, found, rest = page.partition(_AGE)
    if not found:
        return (_part(before),)
    return _part(before + found), _part(rest.partition(b"\n")[2])


def _part(plain: bytes) -> _Part:
    deflate = zlib.compressobj(1, zlib.DEFLATED, _WINDOW_BITS, _MEMORY_LEVEL)
    return _Part(plain, deflate.compress(plain) + deflate.flush(zlib.Z_SYNC_FLUSH))


def _stored(plain: bytes) -> _Part:
    """Return a line as a block that is not compressed (RFC 1951, 3.2.4): it is made at each scrape."""
    return _Part(plain, struct.pack("<BHH", 0, len(plain), len(plain) ^ 0xFFFF) + plain)


def _gzip(parts: tuple[_Part, ...]) -> bytes:
    """Return the parts as one gzip stream: blocks of deflate may stand behind each other, whoever made them."""
    crc, size = 0, 0
    for part in parts:
        crc, size = zlib.crc32(part.plain, crc), size + len(part.plain)
    return b"".join((_GZIP_HEAD, *(part.deflated for part in parts), _LAST_BLOCK, struct.pack("<II", crc, size)))


def _takes_gzip(accept_encoding: str) -> bool:
    """Tell whether gzip is asked for, by name and not with a weight of 0 (RFC 9110, 12.5.3)."""
    for each in accept_encoding.lower().split(","):
        name, *parameters = (word.strip() for word in each.split(";"))
        if name in ("gzip", "x-gzip"):
            return not any(_ZERO.fullmatch(parameter) for parameter in parameters)
    return False
