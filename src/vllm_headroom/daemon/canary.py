"""Periodically request one token from an idle engine, to check that it still responds."""

from collections.abc import Awaitable, Callable
from typing import Final

from vllm_headroom.clock import Clock
from vllm_headroom.daemon.loop import StepGuard
from vllm_headroom.derive.pages import is_page_awake, list_named
from vllm_headroom.log import Log
from vllm_headroom.model import Failure, Snapshot
from vllm_headroom.vocabulary import EngineState

log = Log(__name__)

CANARY_RETRY_SECONDS: Final = 10.0
"""The pause before the next request to an engine that did not respond. The pause is so short that a
temporary error ends before it looks like a hang.
"""


CANARY_EVENTS: Final = {
    True: "canary is answered",
    False: "canary is not answered",
    None: "canary cannot be asked: the engine must serve its model at /v1/completions to this"
    " sidecar's credentials",
}


class Canary:
    """Sends one request at a time, and only while the engine is awake and idle."""

    def __init__(
        self,
        ask: Callable[[str], Awaitable[bool | None]],
        interval_seconds: float,
        clock: Clock,
        *,
        pause_seconds: float,
    ) -> None:
        """Build a canary that has not sent anything yet.

        `ask` sends the request and returns whether the engine responded. `ask` returns None if no
        request can be sent. If more than `pause_seconds` pass between two ticks, the daemon itself
        was stopped. A stopped daemon cannot receive a response.
        """
        self._ask = ask
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._pause_seconds = pause_seconds
        self._last_tick_seconds = clock.monotonic()
        self._last_answer: bool | None = True
        self.unanswered_since_seconds: float | None = None
        """When the first request without a response was sent, on the monotonic clock. None while
        the engine responds or no request is needed.
        """

    async def run(self, read_snapshot: Callable[[], Snapshot | None]) -> None:
        """Send requests forever.

        `read_snapshot` returns the newest snapshot.
        """
        guard = StepGuard()
        while True:
            pause_seconds = self._interval_seconds
            if self.unanswered_since_seconds is not None:
                pause_seconds = min(CANARY_RETRY_SECONDS, pause_seconds)
            await self._clock.sleep_until(self._clock.monotonic() + pause_seconds)
            await guard.run(lambda: self.send(read_snapshot()))

    def note_tick(self) -> None:
        """Record that the daemon is running.

        If the daemon was paused, the pause is subtracted from the engine's silence.
        """
        now_seconds = self._clock.monotonic()
        pause_seconds = now_seconds - self._last_tick_seconds
        self._last_tick_seconds = now_seconds
        if self.unanswered_since_seconds is not None and pause_seconds > self._pause_seconds:
            since_seconds = self.unanswered_since_seconds + pause_seconds
            self.unanswered_since_seconds = min(since_seconds, now_seconds)

    async def send(self, snapshot: Snapshot | None) -> None:
        """Send a request if the engine is known to be idle; await its outcome.

        If the engine is not known to be idle, no request is sent and the recorded silence is reset.
        """
        model_name = None if snapshot is None else _find_idle_model(snapshot)
        if model_name is None:
            self.unanswered_since_seconds = None
            return
        # A request without a response counts as silence from the time it was sent.
        if self.unanswered_since_seconds is None:
            self.unanswered_since_seconds = self._clock.monotonic()
        try:
            answer = await self._ask(model_name)
        except Exception:
            # An error in the daemon does not count as the engine's silence.
            self.unanswered_since_seconds = None
            raise
        # None means that no request could be sent, which does not count as silence.
        if answer is not False:
            self.unanswered_since_seconds = None
        if answer is not self._last_answer:
            write = log.info if answer else log.warning
            write(CANARY_EVENTS[answer])
        self._last_answer = answer


def _find_idle_model(snapshot: Snapshot) -> str | None:
    """Return a model's name if all of the server's engines are awake and idle.

    Returns None if:

    - an engine has a request, is asleep or is missing
    - the page or the engine's state is unknown
    """
    if isinstance(snapshot.engines, Failure) or snapshot.engine_status is None:
        return None
    if is_page_awake(snapshot.engines) is False:
        return None
    # Hang signs may change the state. Requests are also sent to a stalled engine, to detect when
    # the hang ends.
    is_up = snapshot.engine_status.state in (EngineState.SERVING, EngineState.STALLED)
    is_doubted = snapshot.engine_status.are_gauges_doubted
    if not is_up and not is_doubted and not snapshot.engine_status.hang_signs:
        return None
    engines = list_named(snapshot.engines)
    if not engines:
        return None
    is_idle = all(engine.running == 0 and engine.waiting == 0 for engine in engines)
    # If only the gauges are stale, the next request updates them. If the engine is hanging, the
    # request detects it.
    return engines[0].model_name if is_idle or is_doubted else None
