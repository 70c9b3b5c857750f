"""When to ask an idle engine for a token, and since when it has not answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from vllm_headroom.clock import Clock
from vllm_headroom.derive.page_facts import awake, named
from vllm_headroom.model import Failure, Snapshot
from vllm_headroom.vocabulary import EngineState

log = structlog.get_logger()

RETRY_SECONDS: Final = 10.0
"""An engine that did not answer is asked again so soon: an error that passes is over before it counts as a hang."""

SAID: Final = {
    True: "canary is answered",
    False: "canary is not answered",
    None: "canary cannot be asked: the engine must serve its model at /v1/completions to this sidecar's credentials",
}


class Canary:
    """Asks one request at a time, on a task of its own, and only while the engine is awake and has nothing to do.

    `since_seconds` is since when, on the monotonic clock, it has not been answered; None while it is. With more than
    `most_pause_seconds` between two ticks the daemon itself stood still, and could have taken no answer.
    """

    def __init__(
        self,
        ask: Callable[[str], Awaitable[bool | None]],
        interval_seconds: float,
        clock: Clock,
        *,
        most_pause_seconds: float,
    ) -> None:
        self.since_seconds: float | None = None
        self._most_pause_seconds = most_pause_seconds
        self._ticked_seconds = clock.monotonic()
        self._ask = ask
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._said: bool | None = True

    async def run(self, snapshot: Callable[[], Snapshot | None]) -> None:
        """Ask, and wait, for ever; `snapshot` returns the newest one."""
        while True:
            doubted = self.since_seconds is not None
            seconds = min(RETRY_SECONDS, self._interval_seconds) if doubted else self._interval_seconds
            await self._clock.sleep_until(self._clock.monotonic() + seconds)
            await self.turn(snapshot())

    def unanswered_since(self) -> float | None:
        """Return, once a tick, since when nothing has been answered; not for as long as the daemon stood still."""
        before, self._ticked_seconds = self._ticked_seconds, self._clock.monotonic()
        pause = self._ticked_seconds - before
        if self.since_seconds is not None and pause > self._most_pause_seconds:
            self.since_seconds = min(self.since_seconds + pause, self._ticked_seconds)
        return self.since_seconds

    async def turn(self, snapshot: Snapshot | None) -> None:
        """Ask once, unless the engine of this snapshot is not known to be idle."""
        model_name = None if snapshot is None else _idle_model(snapshot)
        if model_name is None:
            self.since_seconds = None
            return
        if self.since_seconds is None:
            self.since_seconds = self._clock.monotonic()
        answered = await self._ask(model_name)
        if answered is not False:
            self.since_seconds = None
        if answered is not self._said:
            tell = log.info if answered else log.warning
            tell(SAID[answered])
        self._said = answered


def _idle_model(snapshot: Snapshot) -> str | None:
    """Return a model of the server while all its engines are there, awake and known to have nothing to do."""
    if isinstance(snapshot.engines, Failure) or snapshot.life is None or awake(snapshot.engines) is False:
        return None
    engines = named(snapshot.engines)
    if snapshot.life.state not in (EngineState.SERVING, EngineState.STALLED) or not engines:
        return None
    idle = all(engine.running == 0 and engine.waiting == 0 for engine in engines)
    return engines[0].model_name if idle else None
