"""The loads that the memory of a real vLLM is recorded under: each a coroutine that lasts for some seconds."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import httpx

from tests.engine.serving import words

SERVED: Final = "tiny"
FEW, USUAL, MANY = 4, 10, 16
BURST_SECONDS, PAUSE_SECONDS, SWING_SECONDS = 60.0, 120.0, 300.0
ADAPTERS: Final = 8
REQUESTS_PER_ADAPTER: Final = 30
chance = random.Random(1)  # noqa: S311 - a load, not a secret


async def level(client: httpx.AsyncClient, seconds: float) -> None:
    """Ten requests a second, each at its own time."""
    await _clients(client, USUAL, seconds)


async def swinging(client: httpx.AsyncClient, seconds: float) -> None:
    """Sixteen requests a second and four in turn, five minutes each."""
    ends = time.monotonic() + seconds
    while (left_seconds := ends - time.monotonic()) > 0:
        await _clients(client, MANY, min(left_seconds, SWING_SECONDS))
        await _clients(client, FEW, min(max(0.0, ends - time.monotonic()), SWING_SECONDS))


async def bursty(client: httpx.AsyncClient, seconds: float) -> None:
    """A minute of more than the engine serves at once, then two of nothing."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        await _clients(client, 2 * MANY, BURST_SECONDS)
        await asyncio.sleep(PAUSE_SECONDS)


async def idle(_client: httpx.AsyncClient, seconds: float) -> None:
    """Nothing."""
    await asyncio.sleep(seconds)


async def adapters(client: httpx.AsyncClient, seconds: float) -> None:
    """Adapters that are loaded, asked and unloaded in turn, beside some requests of the model itself."""
    aside = asyncio.create_task(_clients(client, FEW, seconds))
    ends = time.monotonic() + seconds
    number = 0
    while time.monotonic() < ends:
        name, number = f"adapter-{number % ADAPTERS}", number + 1
        await _post(client, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(Path("adapters") / name)})
        for _ in range(REQUESTS_PER_ADAPTER):
            await _ask(client, name)
        await _post(client, "/v1/unload_lora_adapter", {"lora_name": name})
    await aside


LOADS: Final[Mapping[str, Callable[[httpx.AsyncClient, float], Awaitable[None]]]] = {
    "level": level,
    "swinging": swinging,
    "bursty": bursty,
    "idle": idle,
    "adapters": adapters,
}


async def _clients(client: httpx.AsyncClient, count: int, seconds: float) -> None:
    """Let each client ask once a second on average; one that waits for an answer asks nothing meanwhile."""
    ends = time.monotonic() + seconds

    async def one() -> None:
        while time.monotonic() < ends:
            await asyncio.sleep(chance.expovariate(1.0))
            await _ask(client, SERVED)

    await asyncio.gather(*(one() for _ in range(count)))


async def _ask(client: httpx.AsyncClient, model: str) -> None:
    prompt = words(chance.randrange(1000), chance.randrange(16, 64))
    await _post(client, "/v1/completions", {"model": model, "prompt": prompt, "max_tokens": chance.randrange(1, 5)})


async def _post(client: httpx.AsyncClient, path: str, body: dict[str, object]) -> None:
    """Ask, and do without an answer where the server closes an idle connection just then: hours shall not end by it."""
    with suppress(httpx.TransportError):
        (await client.post(path, json=body)).raise_for_status()
