"""The command `smoke`: its steps, and how they went."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any, Final

from vllm_headroom.commands.cli import Command, tell
from vllm_headroom.commands.smoke.completion import completed
from vllm_headroom.commands.smoke.counters import counted, offered, read_page
from vllm_headroom.commands.smoke.gpus import within
from vllm_headroom.commands.smoke.health import healthy
from vllm_headroom.commands.smoke.reach import Reach
from vllm_headroom.commands.smoke.settings import SmokeSettings
from vllm_headroom.commands.smoke.step import State, Step
from vllm_headroom.config.options import Parser
from vllm_headroom.daemon import logs

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


MARKS: Final = {State.OK: "ok", State.FAILED: "FAILED", State.SKIPPED: "skipped"}


def _options(parser: Parser) -> None:
    parser.add_settings(SmokeSettings)


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


def _text(found: dict[str, Any]) -> Iterator[str]:
    yield from (f"{MARKS[step['state']]:<8} {step['name']:<12} {step['text']}" for step in found["steps"])


COMMAND: Final[Command[dict[str, Any]]] = Command(
    usage="%(prog)s [--json] [OPTION VALUE]...",
    description=DESCRIPTION,
    epilog=EPILOG,
    options=_options,
    run=_run,
    text=_text,
    document=lambda found: found,
    status=lambda found: 0 if found["serves"] else 1,
)
