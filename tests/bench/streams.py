"""Holds many streams at once, ours or a plain httpx loop; prints what they cost."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Final

import httpx
import uvloop

from tests.bench.processes import resident_bytes
from tests.fakes.streaming_server import LOOPBACK, MODEL
from vllm_headroom_tools.load.prompts import PATHS, CompletionApi, build_request_body
from vllm_headroom_tools.load.sender import MOST_CONNECTING, RequestSender
from vllm_headroom_tools.load.tally import Tally
from vllm_headroom_tools.load.target import Target

BODY: Final = build_request_body(CompletionApi.COMPLETIONS, MODEL, "word " * 100, 20)
HEADERS: Final = {"Content-Type": "application/json"}


class Ours:
    """The client of `load`."""

    def __init__(self, port: int, _streams: int) -> None:
        address = (LOOPBACK, port)
        headers = (("Host", LOOPBACK), *HEADERS.items())
        target = Target(
            address=address, host=LOOPBACK, path=PATHS[CompletionApi.COMPLETIONS], headers=headers, tls=None
        )
        self._sender = RequestSender(target=target, make_body=lambda: BODY, timeout_seconds=600)
        self._tally = Tally(time.monotonic())

    async def ask(self) -> None:
        await self._sender.send(self._tally)

    async def close(self) -> int:
        await self._sender.close()
        return self._tally.inter_token_seconds.counts.total()


class Httpx:
    """What one would write with httpx: a pool as large as the streams are many."""

    def __init__(self, port: int, streams: int) -> None:
        limits = httpx.Limits(max_connections=streams, max_keepalive_connections=streams)
        self._client = httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)  # noqa: S113 - as ours
        self._url = f"http://{LOOPBACK}:{port}{PATHS[CompletionApi.COMPLETIONS]}"
        self._connecting = asyncio.Semaphore(MOST_CONNECTING)
        self._gaps = 0

    async def ask(self) -> None:
        last_seconds = None
        await self._connecting.acquire()
        async with self._client.stream("POST", self._url, content=BODY, headers=HEADERS) as answer:
            self._connecting.release()
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                    self._gaps += last_seconds is not None
                    last_seconds = time.monotonic()

    async def close(self) -> int:
        await self._client.aclose()
        return self._gaps


async def main(kind: str, port: int, streams: int) -> dict[str, float]:
    """Hold the streams once; return CPU, events and memory."""
    bytes_before = resident_bytes()
    client = Ours(port, streams) if kind == "ours" else Httpx(port, streams)
    resident_samples, began = [bytes_before], time.process_time()
    looking = asyncio.create_task(_look(lambda: resident_samples.append(resident_bytes())))
    await asyncio.gather(*(client.ask() for _ in range(streams)))
    looking.cancel()
    cpu = time.process_time() - began
    events = await client.close()
    return {"cpu_seconds": cpu, "events": events, "bytes": max(resident_samples) - bytes_before}


async def _look(step: Callable[[], object]) -> None:
    while True:
        step()
        await asyncio.sleep(0.2)


if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.stdout.write(json.dumps(runner.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))))
