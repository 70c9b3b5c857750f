"""Many connections that scrape, from a separate process; prints how long scrapes took.

Arguments: port, connections, scrapes per second of each (0: the next one at once), seconds.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time

import uvloop

REQUEST = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept-Encoding: gzip\r\n\r\n"


async def main(port: int, connections: int, per_second: float, seconds: float) -> None:
    """Let each connection scrape at random moments; one that was closed is made again."""
    took: list[float] = []
    ends = time.monotonic() + seconds
    clients = [_client(port, per_second, ends, random.Random(seed), took) for seed in range(connections)]  # noqa: S311 - not for secrets
    began = time.monotonic()
    await asyncio.gather(*clients)
    took.sort()
    figures = {
        "seconds": time.monotonic() - began,
        "scrapes": len(took),
        "median": took[len(took) // 2],
        "p99": took[len(took) * 99 // 100],
    }
    sys.stdout.write(json.dumps(figures))


async def _client(port: int, per_second: float, ends: float, chance: random.Random, took: list[float]) -> None:
    if per_second:
        await asyncio.sleep(chance.random() / per_second)
    while time.monotonic() < ends:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            while time.monotonic() < ends:
                began = time.monotonic()
                writer.write(REQUEST)
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split()[0]))
                took.append(time.monotonic() - began)
                if per_second:
                    await asyncio.sleep(chance.expovariate(per_second))
            writer.close()
        except (OSError, asyncio.IncompleteReadError):
            await asyncio.sleep(0.1)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])))
