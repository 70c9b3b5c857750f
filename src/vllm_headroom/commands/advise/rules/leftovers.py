"""A rule on GPU memory that is held for no engine any more."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_headroom.commands.advise.facts import Facts
from vllm_headroom.commands.advise.finding import Advice, Cause, Change, Evidence
from vllm_headroom.derive.leftovers import described


def left_behind(facts: Facts) -> Advice | None:
    """Fit where at the end of a trace processes on the engine's GPUs serve no engine any more; a page names none."""
    evidence = tuple(_evidence(facts))
    if not evidence:
        return None
    return Advice(
        cause=Cause.LEFT_BEHIND,
        summary="What is left of an engine that has ended holds GPU memory.",
        evidence=evidence,
        changes=(
            Change(
                text="End it, or where nothing runs any more reset the GPU: vllm-headroom doctor names its pid",
                cost="none to this engine; a reset needs a GPU that nothing else has open",
            ),
        ),
    )


def _evidence(facts: Facts) -> Iterator[Evidence]:
    for gpu in facts.gpus:
        for leftover in gpu.leftovers:
            known = "unknown" if leftover.used_bytes is None else leftover.used_bytes
            yield Evidence("left_behind_bytes", known, f"GPU {gpu.index}: {described(leftover)}")
