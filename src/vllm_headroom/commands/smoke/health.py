"""Waits until the engine is healthy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from vllm_headroom.commands.smoke.reach import Reach
from vllm_headroom.commands.smoke.step import State, Step
from vllm_headroom.model import Failure
from vllm_headroom.units import duration
from vllm_headroom.vocabulary import Reason

PATH: Final = "health"
ANSWER_SECONDS: Final = 5.0
POLL_SECONDS: Final = 1.0
SAY_SECONDS: Final = 30.0
LASTING: Final = frozenset({Reason.TLS, Reason.CREDENTIALS, Reason.UNAUTHORIZED, Reason.REDIRECT})
"""No model that is still loading gives these."""


async def healthy(reach: Reach, deadline_seconds: float, say: Callable[[str], None]) -> Step:
    """Ask until /health answers 200; says what it waits for whenever that changes, and every half minute."""
    now = asyncio.get_running_loop().time
    began = say_at = now()
    ends, said = began + deadline_seconds, ""
    while True:
        answer = await reach.text(PATH, min(ANSWER_SECONDS, deadline_seconds))  # the last question's time as well
        if not isinstance(answer, Failure):
            return Step(State.OK, f"healthy after {duration(now() - began)}")
        if answer.reason in LASTING:
            return Step(State.FAILED, answer.message)
        if now() >= ends:
            return Step(State.FAILED, f"not healthy within {duration(deadline_seconds)}: {answer.message}")
        if answer.message != said or now() >= say_at:
            said, say_at = answer.message, now() + SAY_SECONDS
            say(f"waiting, {duration(ends - now())} left: {said}")
        await asyncio.sleep(min(POLL_SECONDS, max(0.0, ends - now())))
