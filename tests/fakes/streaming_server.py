"""A server like vLLM's that streams, and fails in every way it is instructed to; what it did is counted.

`python -m tests.fakes.streaming_server '{"interval_seconds": 1}'` runs it by itself: it prints its port, and what it
counted when its standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import ssl
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from types import TracebackType
from typing import Any, Final, Self, cast

import uvloop

LOOPBACK: Final = "127.0.0.1"
MODEL: Final = "tiny"
CAPACITY_TOKENS: Final = 1_000_000
OUT_OF_MEMORY: Final = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.12 GiB is free."
)
ENGINE_DEAD: Final = "EngineCore encountered an issue. See stack trace (above) for the root cause."


class Way(StrEnum):
    """How a request is answered."""

    STREAM = "stream"
    WITHOUT_USAGE = "without_usage"
    OUT_OF_MEMORY = "out_of_memory"
    OUT_OF_MEMORY_IN_STREAM = "out_of_memory_in_stream"
    ENGINE_DEAD = "engine_dead"
    ABORTED = "aborted"
    BAD_REQUEST = "bad_request"
    BUSY = "busy"
    UNAVAILABLE = "unavailable"
    STALL = "stall"
    STALL_IN_STREAM = "stall_in_stream"
    CLOSE = "close"
    CUT = "cut"
    RESET = "reset"
    NO_DONE = "no_done"
    NO_STREAM = "no_stream"
    NO_JSON = "no_json"
    NO_HTTP = "no_http"
    CLOSE_AFTER = "close_after"


STATUSES: Final = {
    Way.OUT_OF_MEMORY: (500, OUT_OF_MEMORY),
    Way.ENGINE_DEAD: (500, ENGINE_DEAD),
    Way.BAD_REQUEST: (400, "max_tokens is too large"),
    Way.BUSY: (429, "too many requests"),
    Way.UNAVAILABLE: (503, "the queue is full"),
}
LAST_EVENTS: Final = {
    Way.OUT_OF_MEMORY_IN_STREAM: ({"error": {"message": OUT_OF_MEMORY, "type": "InternalServerError", "code": 500}},),
    Way.ABORTED: ({"choices": [{"index": 0, "text": "", "finish_reason": "abort"}]},),
    Way.NO_JSON: ("{...",),
}
STREAM_HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"


def chunk(*events: object) -> bytes:
    """Return events as a chunk of a body."""
    data = b"".join(
        b"data: " + (event if isinstance(event, str) else json.dumps(event)).encode() + b"\n\n" for event in events
    )
    return b"%x\r\n%b\r\n" % (len(data), data)


TOKENS: Final = {
    "/v1/completions": chunk({"choices": [{"index": 0, "text": " word", "finish_reason": None}]}),
    "/v1/chat/completions": chunk({"choices": [{"index": 0, "delta": {"content": " word"}, "finish_reason": None}]}),
}


class Connection(asyncio.Protocol):
    """Reads requests, and writes what the server decides."""

    def __init__(self, server: StreamingServer) -> None:
        self.way = Way.STREAM
        self.token = b""
        self.asked: dict[str, Any] = {}
        self.sent = 0
        self._server = server
        self._read = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._server.join(self)

    def data_received(self, data: bytes) -> None:
        self._read += data
        head, separator, body = self._read.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        length = int(headers.get("content-length", 0))
        if separator and len(body) >= length:
            self._read = body[length:]
            self._server.answer(self, lines[0].split()[1], headers, body[:length])

    def connection_lost(self, _exc: Exception | None) -> None:
        self._server.leave(self)

    def reply(self, status: int, body: str, kind: str = "application/json") -> None:
        """Answer at once, and keep the connection."""
        data = body.encode()
        head = f"HTTP/1.1 {status} Status\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n"
        self.transport.write(head.encode() + data)

    def reset(self) -> None:
        """Break the connection with RST, as a crashed process's kernel does."""
        plain = self.transport.get_extra_info("socket")
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


class StreamingServer:
    """Serves from construction until `close`, on its own thread and loop.

    `way` shows how the n-th request for a completion is answered. Each stream gets a token every `interval_seconds`,
    all of them at once where that is 0. No stream ends before `least_open` of them have been open at the same time.
    """

    def __init__(
        self,
        way: Callable[[int], Way] = lambda _: Way.STREAM,
        *,
        interval_seconds: float = 0.0,
        least_open: int = 0,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.way = way
        self.least_open = least_open
        self.token = token
        self.connections = 0
        self.requests: list[dict[str, Any]] = []
        self.ways: Counter[Way] = Counter()
        self.most_open = 0
        self.finished = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.preemptions = 0
        self.max_model_len = 4096
        self._interval_seconds = interval_seconds
        self._tls = tls
        self._started_at = time.time()
        self._connected: set[Connection] = set()
        self._open: set[Connection] = set()
        self._stalled: set[Connection] = set()
        self._loop = uvloop.new_event_loop()
        self._listener = socket.create_server((LOOPBACK, 0), backlog=4096)
        self.port: int = self._listener.getsockname()[1]
        self._ready = threading.Event()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait()

    @property
    def url(self) -> str:
        """The address a client is given."""
        return f"{'https' if self._tls else 'http'}://{LOOPBACK}:{self.port}"

    @property
    def open(self) -> int:
        """Requests that are being answered."""
        return len(self._open) + len(self._stalled)

    def close(self) -> None:
        """Break all connections and refuse new ones."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def counts(self) -> dict[str, int]:
        """Return what was counted, as numbers."""
        return {
            "connections": self.connections,
            "requests": self.ways.total(),
            "finished": self.finished,
            "most_open": self.most_open,
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generation_tokens,
        }

    def answer(self, connection: Connection, path: str, headers: dict[str, str], body: bytes) -> None:
        """Begin to answer a request."""
        if path == "/metrics":
            connection.reply(200, self._page(), "text/plain; version=0.0.4")
        elif self.token and headers.get("authorization") != f"Bearer {self.token}":
            connection.reply(401, '{"error": "Unauthorized"}')
        elif path == "/v1/models":
            connection.reply(200, json.dumps({"data": [{"id": MODEL, "max_model_len": self.max_model_len}]}))
        elif path in TOKENS:
            self._complete(connection, TOKENS[path], json.loads(body))
        else:
            connection.reply(404, '{"detail": "Not Found"}')

    def join(self, connection: Connection) -> None:
        """Count a connection."""
        self.connections += 1
        self._connected.add(connection)

    def leave(self, connection: Connection) -> None:
        """Forget a connection that was lost."""
        self._connected.discard(connection)
        self._open.discard(connection)
        self._stalled.discard(connection)

    def _complete(self, connection: Connection, token: bytes, document: dict[str, Any]) -> None:
        way = self.way(self.ways.total())
        self.ways[way] += 1
        self.requests.append(document)
        connection.way, connection.token, connection.asked, connection.sent = way, token, document, 0
        if way in STATUSES:
            status, message = STATUSES[way]
            connection.reply(status, json.dumps({"error": {"message": message, "code": status}}))
        elif way is Way.NO_STREAM:
            connection.reply(200, json.dumps({"choices": [{"text": " word"}]}))
        elif way is Way.NO_HTTP:
            connection.transport.write(b"+PONG\r\n\r\n")
        elif way is Way.STALL:
            self._stalled.add(connection)
        elif way is Way.CLOSE:
            connection.transport.close()
        else:
            close = b"Connection: close\r\n" if way is Way.CLOSE_AFTER else b""
            connection.transport.write(STREAM_HEAD + close + b"\r\n")
            self._open.add(connection)
            self.most_open = max(self.most_open, self.open)
            if not self._interval_seconds and not self.least_open:
                self._step(connection, document["max_tokens"])

    def _step(self, connection: Connection, tokens: int) -> None:
        """Go on with a stream by so many tokens, and end it after the last."""
        wanted = connection.asked["max_tokens"]
        now = min(tokens, wanted - connection.sent)
        connection.transport.write(connection.token * now)
        connection.sent += now
        if connection.sent == wanted and self.most_open >= self.least_open:
            self._open.discard(connection)
            self._end(connection)

    def _end(self, connection: Connection) -> None:
        transport = connection.transport
        match connection.way:
            case Way.STALL_IN_STREAM:
                self._stalled.add(connection)
            case Way.CUT:
                transport.close()
            case Way.RESET:
                connection.reset()
            case Way.NO_DONE:
                transport.write(b"0\r\n\r\n")
            case Way.STREAM | Way.WITHOUT_USAGE | Way.CLOSE_AFTER:
                transport.write(self._last(connection))
                if connection.way is Way.CLOSE_AFTER:
                    transport.close()
            case way:
                transport.write(chunk(*LAST_EVENTS[way], "[DONE]") + b"0\r\n\r\n")

    def _last(self, connection: Connection) -> bytes:
        request = connection.asked
        prompt = request["prompt"] if "prompt" in request else request["messages"][0]["content"]
        usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": connection.sent}
        self.finished += 1
        self.prompt_tokens += usage["prompt_tokens"]
        self.generation_tokens += usage["completion_tokens"]
        wants_usage = request.get("stream_options", {}).get("include_usage") and connection.way is not Way.WITHOUT_USAGE
        return chunk(*([{"choices": [], "usage": usage}] if wants_usage else []), "[DONE]") + b"0\r\n\r\n"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        server = await self._loop.create_server(
            lambda: Connection(self), sock=self._listener, backlog=4096, ssl=self._tls
        )
        ticking = self._loop.create_task(self._tick())
        self._ready.set()
        await self._closing.wait()
        ticking.cancel()
        server.close()
        while self._connected:
            for connection in tuple(self._connected):
                connection.transport.abort()
            await asyncio.sleep(0)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._interval_seconds or 0.01)
            for connection in tuple(self._open):
                self._step(connection, 1 if self._interval_seconds else connection.asked["max_tokens"])

    def _page(self) -> str:
        labels = f'engine="0",model_name="{MODEL}"'
        held_tokens = sum(connection.sent for connection in (*self._open, *self._stalled))
        values = {
            "vllm:num_requests_running": self.open,
            "vllm:num_requests_waiting": 0,
            "vllm:kv_cache_usage_perc": min(1.0, held_tokens / CAPACITY_TOKENS),
            "vllm:num_preemptions_total": self.preemptions,
            "vllm:prompt_tokens_total": self.prompt_tokens,
            "vllm:generation_tokens_total": self.generation_tokens,
            "vllm:prefix_cache_queries_total": self.prompt_tokens,
            "vllm:prefix_cache_hits_total": 0,
        }
        lines = [f"{name}{{{labels}}} {value}" for name, value in values.items()]
        lines += [
            f'vllm:request_success_total{{finished_reason="length",{labels}}} {self.finished}',
            f'vllm:cache_config_info{{kv_cache_size_tokens="{CAPACITY_TOKENS}",engine="0"}} 1.0',
            f"process_start_time_seconds {self._started_at}",
        ]
        return "".join(f"{line}\n" for line in lines)


def main() -> None:
    """Run the server until standard input ends."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with StreamingServer(**json.loads(sys.argv[1])) as server:
        print(server.port, flush=True)  # noqa: T201 - what who starts it waits for
        sys.stdin.read()
        print(json.dumps(server.counts()), flush=True)  # noqa: T201 - the same


if __name__ == "__main__":
    main()
