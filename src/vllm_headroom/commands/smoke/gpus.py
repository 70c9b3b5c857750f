"""Does the engine hold more GPU memory than it reports?"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from vllm_headroom import catalog
from vllm_headroom.commands.smoke.step import State, Step
from vllm_headroom.config.plain import PlainSettings
from vllm_headroom.daemon.look import machine
from vllm_headroom.derive.discrepancy import discrepancy
from vllm_headroom.model import EnginePage, Failure, Sample, Snapshot, called

NOT_ITS_OWN: Final = -0.5
"""A vLLM that has answered holds what it was told to, or is not on this GPU: half of it is missing only then."""

NO_GPU: Final = "none of the visible GPUs can be told to be the engine's: HEADROOM_GPUS names them"
NO_REPORT: Final = (
    "vLLM does not say what it should hold (--kv-cache-memory-bytes replaces its budget): HEADROOM_REPORTED_BYTES does"
)
NO_ENGINE: Final = (
    "the page has no series of an engine, and so no budget: HEADROOM_REPORTED_BYTES says what it should hold"
)
UNKNOWN_HOLDERS: Final = "what the engine holds of its GPUs cannot be told from here: `vllm-headroom doctor` says why"


async def within(settings: PlainSettings, page: EnginePage | Failure, limit_ratio: float) -> Step:
    """Compare each of the engine's GPUs with the limit; skipped where there is nothing to compare, or no GPU."""
    if isinstance(page, Failure):
        return Step(State.SKIPPED, f"the engine's page, which has its budget, cannot be read: {page.message}")
    here = await machine(settings, asyncio.sleep(0, page))
    if isinstance(here.readings, Failure):
        return Step(State.SKIPPED, f"the GPUs cannot be read: {here.readings.message}")
    if not any(gpu.attribution for gpu in here.gpus):
        return Step(State.SKIPPED, NO_GPU)
    snapshot = Snapshot(
        time_seconds=time.time(), monotonic_seconds=time.monotonic(), engines=page, gpus=here.gpus, processes=()
    )
    samples = discrepancy(snapshot, configured_bytes=settings.reported_bytes)
    return judged(samples, limit_ratio) if samples or page.engines else Step(State.SKIPPED, NO_ENGINE)


def judged(samples: tuple[Sample, ...], limit_ratio: float) -> Step:
    """Return how the discrepancies, of which the first label is the GPU, compare with the limit."""
    ratios = [
        (called(*sample.labels[:2]), sample.value)
        for sample in samples
        if sample.metric is catalog.MEMORY_DISCREPANCY_RATIO
    ]
    if not ratios:
        return Step(State.SKIPPED, UNKNOWN_HOLDERS if samples else NO_REPORT)
    told = ", ".join(f"{gpu} {ratio:+.1%}" for gpu, ratio in ratios)
    strangers = [gpu for gpu, ratio in ratios if ratio < NOT_ITS_OWN]
    if any(ratio > limit_ratio for _, ratio in ratios):
        text = f"more is held than was asked for, {told}, where {limit_ratio:.1%} is allowed: who holds it is in"
        text = f"{text} headroom_gpu_memory_held_bytes; or lower --gpu-memory-utilization, or allow --max-discrepancy"
        return Step(State.FAILED, text)
    if strangers:
        return Step(
            State.SKIPPED,
            f"{told}: {', '.join(strangers)} is not the engine's; HEADROOM_GPUS names those that are",
        )
    return Step(State.OK, f"{told}, {limit_ratio:.1%} is allowed")
