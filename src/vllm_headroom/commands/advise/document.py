"""An answer for scripts."""

from __future__ import annotations

from typing import Any

from vllm_headroom.commands.advise.finding import Advice, Change
from vllm_headroom.commands.advise.flags import Flag, spelt
from vllm_headroom.commands.advise.verdict import Answer


def document(answer: Answer) -> dict[str, Any]:
    """Return the one object of --json; bytes, seconds, ratios and tokens, null where unknown."""
    facts = answer.facts
    version = facts.settings.version
    return {
        "verdict": answer.verdict,
        "origin": facts.origin,
        "samples": facts.samples,
        "span_seconds": facts.span_seconds,
        "vllm_version": None if version is None else spelt(version),
        "vllm_version_at_least": spelt(facts.settings.known),
        "advice": [_advice(advice) for advice in answer.advice],
        "missing": list(answer.missing),
        "notes": list(answer.notes),
    }


def _advice(advice: Advice) -> dict[str, Any]:
    return {
        "cause": advice.cause,
        "summary": advice.summary,
        "evidence": {evidence.name: evidence.value for evidence in advice.evidence},
        "changes": [_change(change) for change in advice.changes],
        "remark": advice.remark,
    }


def _change(change: Change) -> dict[str, Any]:
    return {
        "flag": change.flag,
        "value": _value(change.value, change.flag),
        "difference": _value(change.difference, change.flag),
        "now": _value(change.now, change.flag),
        "text": change.text,
        "cost": change.cost,
    }


def _value(value: float | None, flag: Flag | None) -> float | None:
    """Return whole numbers as such: all options but one take no other."""
    return value if value is None or flag is Flag.GPU_MEMORY_UTILIZATION else int(value)
