"""A rule on an engine that lives and does not move."""

from __future__ import annotations

from vllm_headroom.commands.postmortem.facts import Facts
from vllm_headroom.commands.postmortem.finding import Cause, Finding, Sureness
from vllm_headroom.commands.postmortem.rules.shown import ran
from vllm_headroom.units import duration


def hang(facts: Facts) -> Finding | None:
    """Fit where nothing moved though there was work; surely where its page went on to say so."""
    if facts.hung_seconds is None or not facts.served:
        return None
    page = "its page went on to answer" if facts.answered else "its page did not answer, and its processes lived"
    return Finding(
        cause=Cause.HANG,
        sureness=Sureness.SURE if facts.answered and facts.running else Sureness.LIKELY,
        sentence=f"A hang: the engine had work and nothing moved for {duration(facts.hung_seconds)}.",
        evidence=(ran(facts), page),
    )
