"""Concurrent clients: each sends its next request after its answer, or when the pace gives it a turn."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from random import Random
from time import monotonic
from typing import Final, cast

import h11

from vllm_headroom.scrape.shortage import SHORTAGES
from vllm_headroom_tools.load.stream import (
    Completion,
    Outcome,
    Stream,
    StreamError,
    Tally,
    parse_refusal,
    shorten_text,
)
from vllm_headroom_tools.load.target import Target

OK: Final = 200
NO_TIME_WAIT: Final = struct.pack("ii", 1, 0)
"""Ends a connection with RST: with FIN its local port could not be used for a minute, and there are 28,000 of them."""

LOST: Final = Completion(outcome=Outcome.CLOSED)
MOST_BODY_BYTES: Final = 2**16
"""Of an answer that is no stream; enough for a server's error message."""


class ClientConnection(asyncio.Protocol):
    """Carries one request at a time; while `is_reusable` another may follow."""

    def __init__(self) -> None:
        self.is_reusable = False
        self._http = h11.Connection(h11.CLIENT)
        self._reply: asyncio.Future[Completion] | None = None
        self._transport: asyncio.Transport | None = None
        self._stream: Stream | None = None
        self._status = 0
        self._body = b""

    async def ask(self, target: Target, body: bytes, stream: Stream) -> Completion:
        """Send a request, whose answer `stream` will follow, and return its result. Cancelling hangs up."""
        self._reply = asyncio.get_running_loop().create_future()
        self._stream, self._body, self.is_reusable = stream, b"", False
        if self._transport is None or self._transport.is_closing():
            return LOST
        headers = [*target.headers, ("Content-Length", str(len(body)))]
        head = self._http.send(h11.Request(method="POST", target=target.path, headers=headers))
        data = self._http.send(h11.Data(body))
        self._http.send(h11.EndOfMessage())
        self._transport.write((head or b"") + (data or b""))
        del body, data  # 10,000 of them are no small thing to hold while they are answered
        try:
            return await self._reply
        finally:
            if not self.is_reusable:
                self.close()

    def close(self) -> None:
        """Hang up, without the farewell that TLS would wait for."""
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport that the loop has connected."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class
        transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, NO_TIME_WAIT
        )

    def data_received(self, data: bytes) -> None:
        """Take what the server sent."""
        try:
            self._http.receive_data(data)
            self._take()
        except h11.RemoteProtocolError as error:
            self._end(
                Completion(outcome=Outcome.FAILED, text=shorten_text(f"it broke HTTP: {error}"))
            )
        except StreamError as error:
            self._end(Completion(outcome=Outcome.FAILED, text=str(error)))

    def connection_lost(self, exc: Exception | None) -> None:
        """Take the end of the connection, which in HTTP/1.0 is the end of the answer too."""
        self.is_reusable = False
        if exc is None:
            with contextlib.suppress(h11.RemoteProtocolError, StreamError):
                self._http.receive_data(b"")
                self._take()
        self._end(LOST)

    def _take(self) -> None:
        while self._reply is not None and not self._reply.done():
            event = self._http.next_event()
            match event:
                case h11.Response():
                    self._status = event.status_code
                case h11.Data() if self._status != OK:
                    self._body = (self._body + bytes(event.data))[:MOST_BODY_BYTES]
                case h11.Data() if self._stream is not None:
                    self._stream.feed(bytes(event.data), monotonic())
                case h11.EndOfMessage():
                    assert self._stream is not None  # noqa: S101 - an answer follows a question
                    if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
                        self._http.start_next_cycle()
                        self.is_reusable = True
                    self._end(
                        self._stream.answer()
                        if self._status == OK
                        else parse_refusal(self._status, self._body)
                    )
                case h11.NEED_DATA | h11.PAUSED | h11.ConnectionClosed():
                    return

    def _end(self, answer: Completion) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(answer)


AT_ONCE: Final = 256
"""Connections being made at the same time: more overflow the queue of a listening socket, and wait seconds for it."""

KEEP_SECONDS: Final = 4.0
"""vLLM's uvicorn closes a connection that idles 5 s (VLLM_HTTP_TIMEOUT_KEEP_ALIVE); a request sent then is lost."""


class RequestSender:
    """Sends what `make_body` returns to the target; `timeout_seconds` is for a whole request, connecting included."""

    def __init__(
        self, *, target: Target, make_body: Callable[[], bytes], timeout_seconds: float
    ) -> None:
        self._target = target
        self._make_body = make_body
        self._timeout_seconds = timeout_seconds
        self._connecting = asyncio.Semaphore(AT_ONCE)
        self._idle: list[tuple[float, ClientConnection]] = []

    async def ask(self, tally: Tally) -> Outcome:
        """Make one request and count it; one that is cancelled counts as unfinished."""
        tally.began += 1
        answer = Completion(outcome=Outcome.UNFINISHED)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                answer = await self._answer(tally)
        except TimeoutError:
            answer = Completion(outcome=Outcome.TIMED_OUT)
        except OSError as error:
            outcome = Outcome.NOT_SENT if error.errno in SHORTAGES else Outcome.REFUSED
            answer = Completion(outcome=outcome, text=shorten_text(error.strerror or str(error)))
        finally:
            tally.end(answer)
        return answer.outcome

    async def close(self) -> None:
        """Hang up what is kept."""
        for _, connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # the loop lets go of them at its next turn

    async def _answer(self, tally: Tally) -> Completion:
        connection, connecting_seconds = await self._find_connection()
        stream = Stream(tally.between.add)
        asked = connection.ask(self._target, self._make_body(), stream)
        began = monotonic() - connecting_seconds
        tally.streams += 1
        tally.most_streams = max(tally.most_streams, tally.streams)
        try:
            answer = await asked
        finally:
            tally.streams -= 1
        now = monotonic()
        if connection.is_reusable:
            self._idle.append((now, connection))
        if answer.outcome is Outcome.SUCCEEDED:
            tally.succeed(answer, began=began, first=stream.first_seconds or now, ended=now)
        return answer

    async def _find_connection(self) -> tuple[ClientConnection, float]:
        """Return a connection and the seconds it took to make, less those spent waiting for a turn to."""
        while self._idle:
            since, connection = self._idle.pop()
            if connection.is_reusable and monotonic() - since < KEEP_SECONDS:
                return connection, 0.0
            connection.close()
        async with self._connecting:
            began, target = monotonic(), self._target
            _, connection = await asyncio.get_running_loop().create_connection(
                ClientConnection,
                *target.address,
                ssl=target.tls,
                server_hostname=target.host if target.tls else None,
            )
            return connection, monotonic() - began


PAUSE_SECONDS: Final = 1.0
"""How long a client waits after a request that did not succeed: a server that refuses is not flooded."""


class Clients:
    """Runs a step's clients; what is open `grace_seconds` after its end is given up, at once on `stop`.

    `most_requests` is of all steps together, None without a cap. With a rate the loop is open: requests begin as a
    Poisson process does, whatever the server has answered.
    """

    def __init__(
        self,
        *,
        asker: RequestSender,
        grace_seconds: float,
        most_requests: int | None,
        requests_per_second: float | None,
    ) -> None:
        self.stopped = False
        self._asker = asker
        self._grace_seconds = grace_seconds
        self._left = most_requests
        self._whole_rate = self.rate = requests_per_second
        self._next_seconds = 0.0
        self._random = Random()  # noqa: S311 - not for secrets
        self._deadline: asyncio.Timeout | None = None

    @property
    def is_used_up(self) -> bool:
        """Whether the cap is reached."""
        return self._left == 0

    async def run(self, count: int, seconds: float, tally: Tally, share: float) -> None:
        """Run one step, with this share of the rate; returns when all its requests have ended."""
        self._next_seconds = monotonic()
        ends = self._next_seconds + seconds
        self.rate = None if self._whole_rate is None else share * self._whole_rate
        with contextlib.suppress(TimeoutError):
            async with (
                asyncio.timeout(seconds + self._grace_seconds) as self._deadline,
                asyncio.TaskGroup() as group,
            ):
                for _ in range(count):
                    group.create_task(self._client(ends, tally))
        self._deadline = None

    def stop(self) -> None:
        """Give up what is open, and begin nothing more."""
        self.stopped = True
        if self._deadline is not None:
            with contextlib.suppress(RuntimeError):  # it is over already
                self._deadline.reschedule(0.0)

    async def _client(self, ends: float, tally: Tally) -> None:
        while not self.stopped and await self.wait_turn(ends):
            if await self._asker.ask(tally) is not Outcome.SUCCEEDED and self.rate is None:
                if monotonic() + PAUSE_SECONDS >= ends:
                    return
                await asyncio.sleep(PAUSE_SECONDS)

    async def wait_turn(self, until_seconds: float) -> bool:
        """Wait until a client may begin a request; return False where that is not before `until_seconds`."""
        now = monotonic()
        due = now if self.rate is None else self._next_seconds + self._random.expovariate(self.rate)
        if due >= until_seconds or self.is_used_up:
            return False
        self._next_seconds = due
        if self._left is not None:
            self._left -= 1
        if due > now:
            await asyncio.sleep(due - now)
        return True
