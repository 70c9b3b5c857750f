"""Two hundred connections that ask for the costliest page, all at once and without a pause."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack, closing
from functools import partial

from tests.contract.recorded import FOLDER
from tests.fakes.engine_server import LOOPBACK, EngineServer, page
from tests.process import Daemon, daemon, engine_answers, eventually, peak_bytes

RECORDED = (FOLDER / "vllm-0.32.0" / "load-waiting.prom").read_text()
CLIENTS = 200
ASKS = b"GET /snapshot.json HTTP/1.1\r\nHost: x\r\n\r\n"
SETTINGS = {"SAMPLE_INTERVAL_SECONDS": "1", "GATE_READY_SECONDS": "600"}
MIB = 2**20


async def client(port: int, enough: asyncio.Event) -> int:
    """Ask over and over on one connection, which is not to be closed; return how often it was answered."""
    reader, writer = await asyncio.open_connection(LOOPBACK, port)
    with ExitStack() as stack:
        stack.enter_context(closing(writer))
        times = 0
        while not enough.is_set():
            writer.write(ASKS)
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split()[0]))
            assert head.startswith(b"HTTP/1.1 200 "), head
            assert json.loads(body)["version"]
            times += 1
    return times


def samples_and_gates(running: Daemon, engine: EngineServer) -> None:
    """Wait for samples while the gates are queried."""
    old_count = len(engine.requests)

    def more() -> bool:
        assert running.get("/gate/ready").text == "open\n"
        return len(engine.requests) >= old_count + 5

    eventually(more, "samples go on")


async def crowd(running: Daemon, engine: EngineServer) -> list[int]:
    enough, port = asyncio.Event(), int(running.url.rpartition(":")[2])
    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(client(port, enough)) for _ in range(CLIENTS)]
        await asyncio.to_thread(partial(samples_and_gates, running, engine))
        enough.set()
    return [request_task.result() for request_task in asking]


def test_a_crowd_that_asks_for_snapshots_costs_no_gate_and_no_sample() -> None:
    with EngineServer(page(RECORDED)) as engine, daemon(ENGINE_URL=engine.url, **SETTINGS) as running:
        running.sees(engine_answers, "the engine answers")

        answered = asyncio.run(crowd(running, engine))

        assert min(answered) >= 1, "each of the crowd has its turn"
        assert peak_bytes(running.process.pid) < 128 * MIB
        assert running.page().value("gate_open", gate="ready") == 1
        assert "Traceback" not in running.log()
