from __future__ import annotations

import asyncio
import gzip
import tracemalloc

import pytest
import uvloop

from tests.fakes.engine_server import EngineServer, page, raw, with_head
from vllm_headroom.model import Failure
from vllm_headroom.scrape.http.reader import PageReader
from vllm_headroom.vocabulary import Reason

MIB = 2**20


def fetch(url: str, times: int = 1, *, max_bytes: int = 8 * MIB) -> list[str | Failure]:
    """Fetch the page `times` times with one reader, on uvloop as the daemon does."""

    async def run() -> list[str | Failure]:
        reader = PageReader(url=url, timeout_seconds=30, max_bytes=max_bytes)
        pages = [await reader.fetch() for _ in range(times)]
        await reader.close()
        return pages

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def failure(url: str, *, max_bytes: int = 8 * MIB) -> Failure:
    (problem,) = fetch(url, max_bytes=max_bytes)
    assert isinstance(problem, Failure)
    return problem


def fetch_twice(url: str) -> tuple[list[Reason], int]:
    """Return why a page is refused, of which 1 MiB is read, and the most bytes that this takes beside the imports."""
    failure(url, max_bytes=MIB)
    tracemalloc.start()
    try:
        pages = fetch(url, times=2, max_bytes=MIB)
        return [problem.reason for problem in pages if isinstance(problem, Failure)], tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_page_of_just_the_largest_size_is_read_and_a_byte_more_is_not() -> None:
    with EngineServer(page("a" * 1000)) as server:
        assert fetch(server.url, max_bytes=1000) == ["a" * 1000]

        problem = failure(server.url, max_bytes=999)

    assert problem.reason is Reason.TOO_LARGE
    assert "larger than 999 bytes" in problem.message


def test_a_page_too_large_is_not_read_to_its_end_and_costs_its_connection() -> None:
    with EngineServer(raw(with_head(b"a 1\n" * (50 * MIB // 4)))) as server:
        reasons, peak_bytes = fetch_twice(server.url)

    assert reasons == [Reason.TOO_LARGE] * 2
    assert peak_bytes < 4 * MIB
    assert server.connections == 3


def test_a_gzip_bomb_is_never_inflated() -> None:
    bomb = gzip.compress(bytes(64 * MIB))
    with EngineServer(raw(with_head(bomb, headers=("Content-Encoding: gzip",)))) as server:
        reasons, peak_bytes = fetch_twice(server.url)

    assert len(bomb) < MIB  # else the bomb would be too large as it is
    assert reasons == [Reason.MALFORMED] * 2
    assert peak_bytes < 8 * MIB


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate", "identity, gzip"])
def test_an_encoding_that_was_not_asked_for_is_malformed(encoding: str) -> None:
    with EngineServer(raw(with_head(b"x", headers=(f"Content-Encoding: {encoding}",)))) as server:
        problem = failure(server.url)

    assert problem.reason is Reason.MALFORMED
    assert "make it send the page uncompressed" in problem.message


def test_an_encoding_that_changes_nothing_is_none() -> None:
    with EngineServer(raw(with_head(b"a 1\n", headers=("Content-Encoding: Identity",)))) as server:
        assert fetch(server.url) == ["a 1\n"]


def in_parts(text: bytes, part_bytes: int) -> bytes:
    parts = (text[at : at + part_bytes] for at in range(0, len(text), part_bytes))
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


@pytest.mark.parametrize(("lines", "part_bytes"), [(2_000, 4), (50_000, 1024)])
def test_a_page_that_comes_line_by_line_or_in_common_parts_is_read(lines: int, part_bytes: int) -> None:
    with EngineServer(raw(in_parts(b"a 1\n" * lines, part_bytes))) as server:
        assert fetch(server.url) == ["a 1\n" * lines]


def test_a_page_in_crumbs_is_out_of_bounds() -> None:
    with EngineServer(raw(in_parts(b"a 1\n" * 500_000, 4))) as server:
        problem = failure(server.url)

    assert problem.reason is Reason.OUT_OF_BOUNDS
    assert "in parts so small" in problem.message


@pytest.mark.parametrize("hints", [1, 100])
def test_hints_before_the_answer_are_passed_over(hints: int) -> None:
    hint = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
    with EngineServer(raw(hint * hints + with_head(b"a 1\n"))) as server:
        assert fetch(server.url) == ["a 1\n"]


def test_endless_hints_are_no_answer() -> None:
    hint = b"HTTP/1.1 100 Continue\r\n\r\n"
    with EngineServer(raw(hint * 20_000 + with_head(b"a 1\n"))) as server:
        assert failure(server.url).reason is Reason.INCOMPLETE
