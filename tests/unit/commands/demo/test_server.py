from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx

from vllm_headroom.commands.demo.run import present
from vllm_headroom.commands.demo.scenario import TABLE
from vllm_headroom.commands.demo.server import engine_application, serving
from vllm_headroom.commands.demo.world import World
from vllm_headroom.model import EnginePage, Failure
from vllm_headroom.parse.page import parse_engines
from vllm_headroom.scrape.http.reader import PageReader
from vllm_headroom.vocabulary import Reason

TIMEOUT_SECONDS = 10.0


@dataclass
class HandClock:
    """A clock that a test sets."""

    now: float = 100.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    async def sleep_until(self, monotonic_seconds: float) -> None:
        self.now = max(self.now, monotonic_seconds)


def served(world: World, clock: HandClock, talk: Callable[[str], Awaitable[None]]) -> None:
    async def main() -> None:
        async with serving(engine_application(present(world, clock), 0.0)) as url:
            await talk(url)

    asyncio.run(main())


def test_the_daemons_reader_gets_the_page_of_the_present() -> None:
    world, clock = World(TABLE["healthy"]), HandClock()
    finished: list[float | None] = []

    async def talk(url: str) -> None:
        reader = PageReader(url=url, timeout_seconds=TIMEOUT_SECONDS)
        for _ in range(2):
            page = await reader.fetch()
            assert isinstance(page, str)
            understood = parse_engines(page)
            assert isinstance(understood, EnginePage)
            finished.append(understood.engines[0].finished_total)
            clock.now += 60.0
        await reader.close()

    served(world, clock, talk)

    assert world.seconds == 60
    assert finished[0] is not None
    assert finished[1] == world.engine.traffic.finished_total
    assert 300 < finished[1] - finished[0] < 1_200


def test_while_the_engine_is_down_there_is_no_page_and_then_there_is_one_again() -> None:
    world, clock = World(TABLE["restart"]), HandClock()

    async def talk(url: str) -> None:
        reader = PageReader(url=url, timeout_seconds=TIMEOUT_SECONDS)
        while world.engine.number == 0:
            clock.now += 1.0
            world.advance(clock.now - 100.0)
        down = await reader.fetch()
        clock.now += 121.0
        up = await reader.fetch()
        await reader.close()

        assert isinstance(down, Failure)
        assert down.reason is Reason.HTTP_STATUS
        assert isinstance(up, str)

    served(world, clock, talk)


def test_other_paths_are_not_found() -> None:
    async def talk(url: str) -> None:
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(url.replace("/metrics", "/v1/models"))).status_code == 404

    served(World(TABLE["healthy"]), HandClock(), talk)


def test_the_server_is_gone_after_the_block() -> None:
    async def main() -> int:
        async with serving(engine_application(lambda: World(TABLE["healthy"]), 0.0)) as url:
            port = int(url.split(":")[2].split("/")[0])
        try:
            await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            return port
        raise AssertionError("still listening")

    assert asyncio.run(main()) > 0
