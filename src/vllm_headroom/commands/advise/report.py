"""An answer for people, and for scripts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_headroom.commands.advise.facts import Facts, Origin
from vllm_headroom.commands.advise.finding import Advice, Change
from vllm_headroom.commands.advise.settings import Flag, spelt
from vllm_headroom.commands.advise.verdict import Assessment
from vllm_headroom.commands.conclusion import Conclusion
from vllm_headroom.commands.terminal import headed, wrapped
from vllm_headroom.units import duration, instant


def text(answer: Assessment) -> list[str]:
    """Return the advice, cause by cause, and how it ends."""
    lines = [_source(answer.facts)]
    for number, advice in enumerate(answer.advice, start=1):
        lines += ["", *_advice(number, advice)]
    end = [*_end(answer), *(line for note in answer.notes for line in headed("note", note))]
    lines += ["", *end] if answer.advice and end else end
    return lines


def _source(facts: Facts) -> str:
    version = "" if facts.settings.version is None else f"; vLLM {spelt(facts.settings.version)}"
    if facts.origin is Origin.PAGE or facts.begin_seconds is None or facts.end_seconds is None:
        return f"The sidecar's page, now{version}."
    begin, end = facts.begin_seconds, facts.end_seconds
    return f"{facts.samples} samples over {duration(end - begin)}, {instant(begin)} to {instant(end)}{version}."


def _advice(number: int, advice: Advice) -> Iterator[str]:
    yield from wrapped("", f"{number}. {advice.summary}", indent=3)
    for evidence in advice.evidence:
        yield from headed("seen", evidence.text)
    for place, change in enumerate(advice.changes):
        yield from _change("then" if place else "first", change)
    if advice.remark is not None:
        yield from headed("mind", advice.remark)


def _change(head: str, change: Change) -> Iterator[str]:
    what = change.text if change.flag is None else f"{written(change)}: {change.text}"
    yield from headed(head, what)
    yield from headed("", f"costs {change.cost}")


def written(change: Change) -> str:
    """Return a change of an option as it is typed, or by how much to change what is set."""
    flag = "" if change.flag is None else str(change.flag)
    if change.difference is not None:
        word = "lower" if change.difference < 0 else "higher"
        return f"{flag} {_number(abs(change.difference), change.flag)} {word} than it is"
    value = "" if change.value is None else f" {_number(change.value, change.flag)}"
    now = "" if change.now is None else f" (now {_number(change.now, change.flag)})"
    return f"{flag}{value}{now}"


def _number(value: float, flag: Flag | None) -> str:
    if flag is not Flag.GPU_MEMORY_UTILIZATION:
        return f"{value:.0f}"
    return f"{value:.2f}" if round(value, 2) == value else f"{value:.4g}"


def _end(answer: Assessment) -> Iterator[str]:
    if answer.verdict is Conclusion.GOOD:
        yield "Nothing to change." if answer.facts.origin is Origin.TRACE else "Nothing to change now."
    if answer.verdict is Conclusion.CANNOT_TELL:
        yield "Cannot tell whether anything should be changed. Missing:"
    elif answer.missing:
        yield "Whether there is more cannot be told. Missing:"
    for missing in answer.missing:
        yield from headed("", missing)


def document(answer: Assessment) -> dict[str, Any]:
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
        "advice": [_advised(advice) for advice in answer.advice],
        "missing": list(answer.missing),
        "notes": list(answer.notes),
    }


def _advised(advice: Advice) -> dict[str, Any]:
    return {
        "cause": advice.cause,
        "summary": advice.summary,
        "evidence": {evidence.name: evidence.value for evidence in advice.evidence},
        "changes": [_changed(change) for change in advice.changes],
        "remark": advice.remark,
    }


def _changed(change: Change) -> dict[str, Any]:
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
