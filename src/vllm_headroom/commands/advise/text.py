"""An answer for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from vllm_headroom.commands.advise.facts import Facts, Origin
from vllm_headroom.commands.advise.finding import Advice, Change
from vllm_headroom.commands.advise.flags import Flag, spelt
from vllm_headroom.commands.advise.verdict import Answer
from vllm_headroom.commands.text import wrapped
from vllm_headroom.commands.verdict import Verdict
from vllm_headroom.units import duration, instant

HEAD: Final = 9
"""Columns of the words on the left: what was seen, what to do."""


def text(answer: Answer) -> list[str]:
    """Return the advice, cause by cause, and how it ends."""
    lines = [_source(answer.facts)]
    for number, advice in enumerate(answer.advice, start=1):
        lines += ["", *_advice(number, advice)]
    end = [*_end(answer), *(line for note in answer.notes for line in _wrapped("note", note))]
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
        yield from _wrapped("seen", evidence.text)
    for place, change in enumerate(advice.changes):
        yield from _change("then" if place else "first", change)
    if advice.remark is not None:
        yield from _wrapped("mind", advice.remark)


def _change(head: str, change: Change) -> Iterator[str]:
    what = change.text if change.flag is None else f"{written(change)}: {change.text}"
    yield from _wrapped(head, what)
    yield from _wrapped("", f"costs {change.cost}")


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


def _end(answer: Answer) -> Iterator[str]:
    if answer.verdict is Verdict.GOOD:
        yield "Nothing to change." if answer.facts.origin is Origin.TRACE else "Nothing to change now."
    if answer.verdict is Verdict.CANNOT_TELL:
        yield "Cannot tell whether anything should be changed. Missing:"
    elif answer.missing:
        yield "Whether there is more cannot be told. Missing:"
    for missing in answer.missing:
        yield from _wrapped("", missing)


def _wrapped(head: str, body: str) -> list[str]:
    return wrapped(f"   {head:<{HEAD - 3}}", body)
