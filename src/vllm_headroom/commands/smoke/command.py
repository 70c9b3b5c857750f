"""The command `smoke`: its steps, what it prints, and how it went as the exit status."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, Final

from vllm_headroom.commands.cli import say
from vllm_headroom.commands.smoke.completion import completed
from vllm_headroom.commands.smoke.counters import counted, offered, read_page
from vllm_headroom.commands.smoke.gpus import within
from vllm_headroom.commands.smoke.health import healthy
from vllm_headroom.commands.smoke.reach import Reach
from vllm_headroom.commands.smoke.settings import SmokeSettings
from vllm_headroom.commands.smoke.step import Name, State, Step
from vllm_headroom.daemon import logs

SERVES: Final = 0
FAILED: Final = 1


async def serve(settings: SmokeSettings, *, as_json: bool) -> int:
    """Print how it goes; return the exit status."""
    logs.configure(settings.log_format, "error")  # the readers log what is told here in full
    reach = Reach(settings)
    steps = await taken(settings, reach, _to_stderr)
    say(json.dumps(document(steps, reach), indent=2) if as_json else text(steps))
    return SERVES if serves(steps) else FAILED


async def taken(settings: SmokeSettings, reach: Reach, tell: Callable[[str], None]) -> tuple[Step, ...]:
    """Take the steps one after another; without health there is nothing to ask, and the others are skipped."""
    health = await healthy(reach, settings.deadline, tell)
    if health.state is State.FAILED:
        others = (name for name in Name if name is not Name.HEALTH)
        return (health, *(Step(name=name, state=State.SKIPPED, text="vLLM is not healthy") for name in others))
    before = await read_page(reach)
    completion = await completed(reach, settings.completion_deadline)
    if completion.state is State.FAILED:
        metrics, page = offered(before), before
    else:
        metrics, page = await counted(reach, before)
    return health, completion, metrics, await within(settings, page, settings.max_discrepancy)


def serves(steps: tuple[Step, ...]) -> bool:
    """Tell whether nothing failed; what was skipped is told, and does not fail."""
    return all(step.state is not State.FAILED for step in steps)


def text(steps: tuple[Step, ...]) -> str:
    """Return what a person reads."""
    return "\n".join(f"{step.state:<8} {step.name:<12} {step.text}" for step in steps)


def document(steps: tuple[Step, ...], reach: Reach) -> dict[str, Any]:
    """Return the same for scripts."""
    return {
        "serves": serves(steps),
        "engine_url": reach.address(""),
        "steps": [{"name": step.name, "state": step.state, "text": step.text} for step in steps],
    }


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
