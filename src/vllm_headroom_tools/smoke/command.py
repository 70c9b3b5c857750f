"""The command `smoke`: its steps, and how they went."""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any, ClassVar, Final

from vllm_headroom import catalog
from vllm_headroom.config.fields import setting
from vllm_headroom.config.kinds import SHARE, Value, above_zero, bounded
from vllm_headroom.config.plain import PlainSettings
from vllm_headroom.config.settings import Settings
from vllm_headroom.daemon import logs
from vllm_headroom.derive.discrepancy import derive_discrepancy
from vllm_headroom.model import EnginePage, Failure, Sample, Snapshot, name_device
from vllm_headroom.units import format_duration, parse_duration
from vllm_headroom.vocabulary import Reason
from vllm_headroom_tools.cli import Command, tell
from vllm_headroom_tools.look import read_machine
from vllm_headroom_tools.smoke.completion import (
    EngineServer,
    SmokeStep,
    StepState,
    check_counters,
    check_inputs,
    read_page,
    request_completion,
)

NOT_ITS_OWN: Final = -0.5
"""A vLLM that has answered holds its budget: less than half of it means that it is not on this GPU."""

NO_GPU: Final = "none of the visible GPUs is known to be the engine's: name them in HEADROOM_GPUS"
NO_REPORT: Final = (
    "vLLM does not report its budget (--kv-cache-memory-bytes replaces it): set HEADROOM_REPORTED_BYTES to what it"
    " should hold"
)
NO_ENGINE: Final = (
    "the page has no series of an engine, and so no budget: set HEADROOM_REPORTED_BYTES to what it should hold"
)
UNKNOWN_HOLDERS: Final = "what the engine holds of its GPUs cannot be seen from here: `vllm-headroom doctor` says why"


async def check_discrepancy(settings: PlainSettings, page: EnginePage | Failure, limit_ratio: float) -> SmokeStep:
    """Compare each of the engine's GPUs with the limit; skipped where there is nothing to compare, or no GPU."""
    if isinstance(page, Failure):
        return SmokeStep(StepState.SKIPPED, f"the engine's page, which has its budget, cannot be read: {page.message}")
    here = await read_machine(settings, asyncio.sleep(0, page))
    if isinstance(here.readings, Failure):
        return SmokeStep(StepState.SKIPPED, f"the GPUs cannot be read: {here.readings.message}")
    if not any(gpu.attribution for gpu in here.gpus):
        return SmokeStep(StepState.SKIPPED, NO_GPU)
    snapshot = Snapshot(
        time_seconds=time.time(), monotonic_seconds=time.monotonic(), engines=page, gpus=here.gpus, processes=()
    )
    samples = derive_discrepancy(snapshot, configured_bytes=settings.reported_bytes)
    return (
        judge_discrepancies(samples, limit_ratio)
        if samples or page.engines
        else SmokeStep(StepState.SKIPPED, NO_ENGINE)
    )


def judge_discrepancies(samples: tuple[Sample, ...], limit_ratio: float) -> SmokeStep:
    """Return how the discrepancies, of which the first label is the GPU, compare with the limit."""
    ratios = [
        (name_device(*sample.labels[:2]), sample.value)
        for sample in samples
        if sample.metric is catalog.MEMORY_DISCREPANCY_RATIO
    ]
    if not ratios:
        return SmokeStep(StepState.SKIPPED, UNKNOWN_HOLDERS if samples else NO_REPORT)
    ratios_text = ", ".join(f"{gpu} {ratio:+.1%}" for gpu, ratio in ratios)
    strangers = [gpu for gpu, ratio in ratios if ratio < NOT_ITS_OWN]
    if any(ratio > limit_ratio for _, ratio in ratios):
        text = f"more is held than was asked for, {ratios_text}, where {limit_ratio:.1%} is allowed: who holds it is in"
        text = f"{text} headroom_gpu_memory_held_bytes; or lower --gpu-memory-utilization, or allow --max-discrepancy"
        return SmokeStep(StepState.FAILED, text)
    if strangers:
        return SmokeStep(
            StepState.SKIPPED,
            f"{ratios_text}: {', '.join(strangers)} is not the engine's; HEADROOM_GPUS names those that are",
        )
    return SmokeStep(StepState.OK, f"{ratios_text}, {limit_ratio:.1%} is allowed")


USED: Final = frozenset({"gpus", "reported_bytes"})


DURATION: Final = Value(
    read=above_zero(bounded(parse_duration, 0, 86400)),
    accepts="a duration above 0, at most a day, such as 90s or 15m",
)


class SmokeSettings(Settings):
    """The daemon's settings that reach the engine and its GPUs, and the smoke test's."""

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
        SHARE, 0.05, "SHARE", "How much more GPU memory vLLM may hold than it was configured to use.", shown="5%"
    )


DESCRIPTION: Final = """\
Says whether a vLLM that was just started serves: waits until it is healthy,
lets it complete one short prompt, looks for that request in its metrics, and
compares the GPU memory it holds with what it was configured to use. It takes
the daemon's settings for how to reach vLLM.
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


async def wait_until_healthy(reach: EngineServer, deadline_seconds: float, say: Callable[[str], None]) -> SmokeStep:
    """Poll /health until it answers 200; report what it waits for when that changes, and every half minute."""
    now = asyncio.get_running_loop().time
    began = say_at = now()
    ends, said = began + deadline_seconds, ""
    while True:
        answer = await reach.text(PATH, min(ANSWER_SECONDS, deadline_seconds))  # the last question's time as well
        if not isinstance(answer, Failure):
            return SmokeStep(StepState.OK, f"healthy after {format_duration(now() - began)}")
        if answer.reason in LASTING:
            return SmokeStep(StepState.FAILED, answer.message)
        if now() >= ends:
            return SmokeStep(
                StepState.FAILED, f"not healthy within {format_duration(deadline_seconds)}: {answer.message}"
            )
        if answer.message != said or now() >= say_at:
            said, say_at = answer.message, now() + SAY_SECONDS
            say(f"waiting, {format_duration(ends - now())} left: {said}")
        await asyncio.sleep(min(POLL_SECONDS, max(0.0, ends - now())))


MARKS: Final = {StepState.OK: "ok", StepState.FAILED: "FAILED", StepState.SKIPPED: "skipped"}


async def _run(given: Namespace) -> dict[str, Any]:
    settings: SmokeSettings = given.settings
    logs.configure(settings.log_format, "error")  # the readers log what the steps report
    reach = EngineServer(settings.values())
    steps = await take_steps(settings, reach, tell)
    return {
        "serves": all(step.state is not StepState.FAILED for step in steps.values()),  # what was skipped does not fail
        "engine_url": reach.address(""),
        "steps": [{"name": name, "state": step.state, "text": step.text} for name, step in steps.items()],
    }


async def take_steps(settings: SmokeSettings, reach: EngineServer, say: Callable[[str], None]) -> dict[str, SmokeStep]:
    """Take the steps one after another; without health the others are skipped."""
    health = await wait_until_healthy(reach, settings.deadline, say)
    if health.state is StepState.FAILED:
        skipped = SmokeStep(StepState.SKIPPED, "vLLM is not healthy")
        return {"health": health} | dict.fromkeys(("completion", "metrics", "discrepancy"), skipped)
    before = await read_page(reach)
    completion = await request_completion(reach, settings.completion_deadline)
    if completion.state is StepState.FAILED:
        metrics, page = check_inputs(before), before
    else:
        metrics, page = await check_counters(reach, before)
    discrepancy = await check_discrepancy(settings.values(), page, settings.max_discrepancy)
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
