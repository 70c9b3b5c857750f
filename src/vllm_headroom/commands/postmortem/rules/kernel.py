"""A rule on the kernel's own hand."""

from __future__ import annotations

from vllm_headroom.commands.postmortem.facts import Facts
from vllm_headroom.commands.postmortem.finding import Cause, Finding, Sureness
from vllm_headroom.commands.postmortem.rules.shown import ran
from vllm_headroom.vocabulary import ExitReason


def killed(facts: Facts) -> Finding | None:
    """Fit where the kernel counted a kill in the engine's container as this life ended."""
    if facts.reason is not ExitReason.OOM_KILLED:
        return None
    return Finding(
        cause=Cause.KILLED,
        sureness=Sureness.SURE,
        sentence="Killed by the kernel: the host's memory, not the GPU's, had run out.",
        evidence=("the kernel counted a kill for want of memory in the engine's container then", ran(facts)),
    )
