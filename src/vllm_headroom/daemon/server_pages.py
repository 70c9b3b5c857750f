"""Request other pages if the engine's metrics page fails or shows no progress."""

from collections.abc import Awaitable, Callable
from typing import Final

from msgspec.structs import replace

from vllm_headroom.clock import Clock
from vllm_headroom.daemon.loop import StepGuard
from vllm_headroom.derive.life.progress import SIGN_SECONDS
from vllm_headroom.log import Log
from vllm_headroom.model import Failure, ServerReply, Snapshot
from vllm_headroom.vocabulary import Reason, ServerAnswer

log = Log(__name__)

ROUND_SECONDS: Final = 10.0
"""The pause between two rounds. There is time for six rounds before the engine counts as stalled.
"""

OPEN_REASONS: Final = frozenset({Reason.HTTP_STATUS, Reason.TIMEOUT, Reason.INCOMPLETE})
"""Reasons why the metrics page may fail although the server is still running. For any other reason,
requesting other pages is pointless. For example, a closed port refuses all pages. A login page
means that the address or the token is wrong.
"""


class ServerPages:
    """Sends requests while the metrics page is not sufficient, one round at a time."""

    def __init__(self, request: Callable[[], Awaitable[ServerReply]], clock: Clock) -> None:
        self._request = request
        self._clock = clock
        self._was_silent = False
        self.latest: ServerReply | None = None
        """The result of the latest round, or None while nothing is requested."""

    async def run(self, read_snapshot: Callable[[], Snapshot | None]) -> None:
        """Send rounds of requests until cancelled; `read_snapshot` returns the newest snapshot."""
        guard = StepGuard()
        while True:
            await self._clock.sleep_until(self._clock.monotonic() + ROUND_SECONDS)
            await guard.run(lambda: self.send(read_snapshot()))

    async def send(self, snapshot: Snapshot | None) -> None:
        """Send one round of requests, if the metrics page in this snapshot is not sufficient."""
        if snapshot is None or not _is_page_insufficient(snapshot):
            self.latest = None
            self._was_silent = False
            return
        try:
            reply = await self._request()
        except Exception:
            self.latest = None
            raise
        is_silent = reply.answer is ServerAnswer.SILENT
        if is_silent and not self._was_silent:
            # A single late response does not count as silence and must not cause a restart.
            reply = replace(reply, answer=ServerAnswer.UNCLEAR)
        self._was_silent = is_silent
        if self.latest is None or reply.answer is not self.latest.answer:
            log.info("engine's other pages requested", answer=str(reply.answer))
        self.latest = reply


def _is_page_insufficient(snapshot: Snapshot) -> bool:
    """Return whether the page shows no progress, or fails while the server may be running."""
    if isinstance(snapshot.engines, Failure):
        return snapshot.engines.reason in OPEN_REASONS
    status = snapshot.engine_status
    if status is None:
        return False
    # If the engine makes no progress, other pages may show whether the server responds.
    is_still = status.progress_age_seconds is not None and (
        status.progress_age_seconds >= SIGN_SECONDS
    )
    return is_still or status.are_gauges_doubted
