"""One request after another, each over a connection that is kept where it can be."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from time import monotonic
from typing import Final

from vllm_headroom.commands.load.connection import ClientConnection
from vllm_headroom.commands.load.stream import Completion, Outcome, Stream, shown
from vllm_headroom.commands.load.tally import Tally
from vllm_headroom.commands.load.target import Target

AT_ONCE: Final = 256
"""Connections being made at the same time: more overflow the queue of a listening socket, and wait seconds for it."""

KEEP_SECONDS: Final = 4.0
"""vLLM's uvicorn closes a connection that idles 5 s (VLLM_HTTP_TIMEOUT_KEEP_ALIVE); a request sent then is lost."""

OWN: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})
"""Errors of this machine, not the server's: no descriptor, no port or no memory left."""

UNFINISHED: Final = Completion(outcome=Outcome.UNFINISHED)


class Asker:
    """Sends what `make_body` returns to the target; `timeout_seconds` is for a whole request, connecting included."""

    def __init__(self, *, target: Target, make_body: Callable[[], bytes], timeout_seconds: float) -> None:
        self._target = target
        self._make_body = make_body
        self._timeout_seconds = timeout_seconds
        self._connecting = asyncio.Semaphore(AT_ONCE)
        self._idle: list[tuple[float, ClientConnection]] = []

    async def ask(self, tally: Tally) -> Outcome:
        """Make one request and count it; one that is cancelled counts as unfinished."""
        tally.begin()
        answer = UNFINISHED
        try:
            async with asyncio.timeout(self._timeout_seconds):
                answer = await self._answer(tally)
        except TimeoutError:
            answer = Completion(outcome=Outcome.TIMED_OUT)
        except OSError as error:
            outcome = Outcome.NOT_SENT if error.errno in OWN else Outcome.REFUSED
            answer = Completion(outcome=outcome, text=shown(error.strerror or str(error)))
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
        connection, connecting_seconds = await self._connection()
        body = self._make_body()
        began = monotonic() - connecting_seconds
        stream = Stream(tally.between.add)
        connection.send(self._target, body, stream)
        del body  # 10,000 of them are no small thing to hold while they are answered
        with tally.stream():
            answer = await connection.answer()
        now = monotonic()
        if connection.reusable:
            self._idle.append((now, connection))
        if answer.outcome is Outcome.SUCCEEDED:
            tally.succeed(answer, began=began, first=stream.first_seconds or now, ended=now)
        return answer

    async def _connection(self) -> tuple[ClientConnection, float]:
        """Return a connection and the seconds it took to make, less those spent waiting for a turn to."""
        while self._idle:
            since, connection = self._idle.pop()
            if connection.reusable and monotonic() - since < KEEP_SECONDS:
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
