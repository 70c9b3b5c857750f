"""Read the log of a container in this pod from the API server."""

import asyncio
import json
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlencode

from vllm_headroom.model import Failure
from vllm_headroom.scrape.http.reader import PageReader, Reply
from vllm_headroom.scrape.log.batch import LogBatch
from vllm_headroom.vocabulary import REASONS, Reason, Source

PAUSE_SECONDS: Final = 10.0
"""The time between two rounds of requests. The time is long because the whole cluster shares the
API server.
"""

MOST_BYTES: Final = 2 * 2**20
"""The maximum number of log bytes that one request returns. The next rounds read the rest."""

FIRST_LINES: Final = 50_000
"""The first round reads this many of the newest lines. They cover a startup and a day under load.
"""

LONGEST_TIME: Final = 40
"""The maximum length of the timestamp before a line. RFC 3339 with nanoseconds takes 35 characters.
"""

SHOWN_CHARACTERS: Final = 200
"""The number of characters of the API server's message that are shown."""


class RequestFailedError(Exception):
    """The API server refused a request or did not respond to it."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class PodLog:
    """Reads additions to a container's log, and the last lines of the previous container.

    The Role needs `get` on pods and on pods/log.
    """

    def __init__(self, api: PageReader, *, namespace: str, pod: str, container: str) -> None:
        self._api = api
        self._path = f"/api/v1/namespaces/{namespace}/pods/{pod}"
        self._container = container
        self._restarts: int | None = None
        """The number of container restarts at the last round, or None before the first round."""
        self._newest_time = ""
        """The timestamp of the newest line read, or "" before the first line."""
        self._next_seconds = 0.0
        """When the next round is to begin, on the event loop's clock."""
        self._failure: Failure | None = None
        """Why the last round failed, or None if it succeeded."""

    async def fetch(self, timeout_seconds: float) -> LogBatch | Failure:
        """Return the additions; never raise.

        Between two rounds, returns the last failure or an empty batch.
        """
        now_seconds = asyncio.get_running_loop().time()
        if now_seconds < self._next_seconds:
            return self._failure or LogBatch(content=b"")
        # The time is set before the request. A failing server is therefore not asked on every tick.
        self._next_seconds = now_seconds + PAUSE_SECONDS
        self._failure = None
        try:
            async with asyncio.timeout(timeout_seconds):
                return await self._read_round()
        except RequestFailedError as error:
            self._failure = error.failure
        except TimeoutError:
            problem = f"the API server did not answer within {timeout_seconds:g} s"
            self._failure = _build_failure(Reason.TIMEOUT, problem)
        return self._failure

    async def _read_round(self) -> LogBatch:
        """Return additions since the last round; raise RequestFailedError if a request fails."""
        restarts = await self._count_restarts()
        is_first = self._restarts is None
        content = b""
        if self._restarts is not None and restarts != self._restarts:
            # The previous container wrote its final lines after the last round.
            content = await self._read_log(is_previous=True)
        content += await self._read_log(is_previous=False)
        self._restarts = restarts
        return LogBatch(content=content, is_old=is_first, is_broken=is_first)

    async def _count_restarts(self) -> int:
        """Return the container's restart count; raise RequestFailedError if there is no count."""
        reply = await self._ask(self._path)
        try:
            pod: Any = json.loads(reply.text)
            for status in pod["status"].get("containerStatuses", ()):
                if status["name"] == self._container:
                    return int(status["restartCount"])
        except (
            ValueError,
            OverflowError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
        ):
            problem = "the API server's answer is not understood"
            raise RequestFailedError(_build_failure(Reason.MALFORMED, problem)) from None
        problem = f"this pod has no container {self._container}: set HEADROOM_ENGINE_CONTAINER"
        raise RequestFailedError(_build_failure(Reason.NOT_FOUND, problem))

    async def _read_log(self, *, is_previous: bool) -> bytes:
        """Return the lines not read before; raise RequestFailedError if the request fails."""
        query = {
            "container": self._container,
            "timestamps": "true",
            "limitBytes": str(MOST_BYTES),
            "previous": "true" if is_previous else "false",
        }
        if self._newest_time:
            query["sinceTime"] = self._newest_time
        else:
            query["tailLines"] = str(FIRST_LINES)
        try:
            reply = await self._ask(f"{self._path}/log?{urlencode(query)}")
        except RequestFailedError as error:
            # A container that is waiting to start has no log. The log may also have been removed.
            if error.failure.reason is Reason.HTTP_STATUS:
                return b""
            raise
        lines = reply.text.split("\n")
        # The last line is either empty or cut off by the limit. The next round gets the whole line.
        lines.pop()
        # The API server compares whole seconds, so it returns some lines again.
        newest_key = _build_time_key(self._newest_time)
        new_lines = [line for line in lines if _build_time_key(line) > newest_key]
        if new_lines:
            self._newest_time, _, _ = new_lines[-1][:LONGEST_TIME].partition(" ")
        return "".join(f"{line}\n" for line in new_lines).encode()

    async def _ask(self, path: str) -> Reply:
        """Return the reply to a request.

        Raises RequestFailedError if there is no reply or the request is refused.
        """
        reply = await self._api.send("GET", path, None)
        if isinstance(reply, Failure):
            problem = f"the API server does not answer ({reply.reason})"
            raise RequestFailedError(_build_failure(_choose_reason(reply.reason), problem))
        if reply.status == HTTPStatus.OK:
            return reply
        reason = Reason.HTTP_STATUS
        problem = f"the API server answers {reply.status}"
        if reply.status == HTTPStatus.FORBIDDEN:
            reason = Reason.NO_PERMISSION
            problem += ": the Role needs get on pods and pods/log"
        elif reply.status == HTTPStatus.UNAUTHORIZED:
            reason = Reason.UNAUTHORIZED
        raise RequestFailedError(_build_failure(reason, problem))


def _build_time_key(line: str) -> str:
    """Return a sort key for a line's timestamp, from which Go omits trailing zeros."""
    time, _, _ = line[:LONGEST_TIME].partition(" ")
    # Without the Z, a shorter fraction is a prefix of a longer one. The shorter fraction therefore
    # sorts before the longer one.
    return time.rstrip("Z")


def _choose_reason(reason: Reason) -> Reason:
    """Return the reason, or UNAVAILABLE if it is not defined for the log."""
    return reason if reason in REASONS[Source.LOG] else Reason.UNAVAILABLE


def _build_failure(reason: Reason, problem: str) -> Failure:
    message = f"the engine's log: {problem} (HEADROOM_ENGINE_LOG=kubernetes)"
    return Failure(source=Source.LOG, reason=reason, message=message)
