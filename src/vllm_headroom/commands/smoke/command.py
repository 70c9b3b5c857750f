"""The command `smoke`: its steps, and how they went."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Callable
from typing import Any, ClassVar, Final

from vllm_headroom.commands.cli import Command, tell
from vllm_headroom.commands.smoke.completion import completed, counted, offered, read_page
from vllm_headroom.commands.smoke.gpus import within
from vllm_headroom.commands.smoke.reach import Reach
from vllm_headroom.commands.smoke.step import State, Step
from vllm_headroom.config.fields import setting
from vllm_headroom.config.kinds import SHARE, Value, above_zero, bounded
from vllm_headroom.config.settings import Settings
from vllm_headroom.daemon import logs
from vllm_headroom.model import Failure
from vllm_headroom.units import duration, duration_seconds
from vllm_headroom.vocabulary import Reason

USED: Final = frozenset({"gpus", "reported_bytes"})


DURATION: Final = Value(
    read=above_zero(bounded(duration_seconds, 0, 86400)),
    accepts="a duration above 0, at most a day, such as 90s or 15m",
)


class SmokeSettings(Settings):
    """The daemon's settings for how to reach the engine and its GPUs, and the smoke test's own."""

    no_options: ClassVar = frozenset(
        name for name in Settings.model_fields if not name.startswith("engine_") and name not in USED
    )

    deadline: float = setting(
        DURATION,
        900,
        "DURATION",
        "How long vLLM may take until it is healthy; a large model loads for minutes.",
        shown="15m",
    )
    completion_deadline: float = setting(
        DURATION, 120, "DURATION", "How long the one completion may take; the first compiles kernels.", shown="2m"
    )
    max_discrepancy: float = setting(
        SHARE, 0.05, "SHARE", "How much more GPU memory vLLM may hold than it was told to use.", shown="5%"
    )


DESCRIPTION: Final = """\
Says whether a vLLM that was just started serves: waits until it is healthy,
lets it complete one short prompt, looks for that request in its metrics, and
compares the GPU memory it holds with what it was told to use. It takes the
daemon's settings for how to reach vLLM.
"""

EPILOG: Final = """\
It ends with status 0 when vLLM serves, 1 when something failed, and 2 when it
cannot use its settings. What cannot be looked at from here is skipped, and it
says why.

Example:
  vllm-headroom smoke --engine-url http://127.0.0.1:8000 --deadline 20m
"""

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


MARKS: Final = {State.OK: "ok", State.FAILED: "FAILED", State.SKIPPED: "skipped"}


async def _run(given: Namespace) -> dict[str, Any]:
    settings: SmokeSettings = given.settings
    logs.configure(settings.log_format, "error")  # the readers log what is told here in full
    reach = Reach(settings.values())
    steps = await taken(settings, reach, tell)
    return {
        "serves": all(step.state is not State.FAILED for step in steps.values()),  # what was skipped does not fail
        "engine_url": reach.address(""),
        "steps": [{"name": name, "state": step.state, "text": step.text} for name, step in steps.items()],
    }


async def taken(settings: SmokeSettings, reach: Reach, say: Callable[[str], None]) -> dict[str, Step]:
    """Take the steps one after another; without health there is nothing to ask, and the others are skipped."""
    health = await healthy(reach, settings.deadline, say)
    if health.state is State.FAILED:
        skipped = Step(State.SKIPPED, "vLLM is not healthy")
        return {"health": health} | dict.fromkeys(("completion", "metrics", "discrepancy"), skipped)
    before = await read_page(reach)
    completion = await completed(reach, settings.completion_deadline)
    if completion.state is State.FAILED:
        metrics, page = offered(before), before
    else:
        metrics, page = await counted(reach, before)
    discrepancy = await within(settings.values(), page, settings.max_discrepancy)
    return {"health": health, "completion": completion, "metrics": metrics, "discrepancy": discrepancy}


COMMAND: Final[Command[dict[str, Any]]] = Command(
    usage="%(prog)s [--json] [OPTION VALUE]...",
    description=DESCRIPTION,
    epilog=EPILOG,
    options=lambda parser: parser.add_settings(SmokeSettings),
    run=_run,
    text=lambda found: (f"{MARKS[step['state']]:<8} {step['name']:<12} {step['text']}" for step in found["steps"]),
    document=lambda found: found,
    status=lambda found: 0 if found["serves"] else 1,
)
