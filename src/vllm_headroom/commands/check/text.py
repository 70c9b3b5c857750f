"""Judgements as a table for people, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from vllm_headroom.commands.check.judgement import Judgement, Outcome, overall
from vllm_headroom.commands.check.record import Record
from vllm_headroom.commands.text import wrapped
from vllm_headroom.units import duration

MARKS: Final = {Outcome.PASSED: "passed", Outcome.FAILED: "FAILED", Outcome.CANNOT_TELL: "cannot tell"}
HEADS: Final = ("", "limit", "of", "found", "at most", "baseline")
INDENT: Final = " " * 13
"""The width of the marks: a reason stands below the limit's name."""


def told(outcome: Outcome, judgements: Sequence[Judgement]) -> str:
    """Return the sum in a line."""
    counts = {each: sum(judgement.outcome is each for judgement in judgements) for each in Outcome}
    if outcome is Outcome.PASSED:
        return f"Passed: all {len(judgements)} limits kept."
    failed, unknown = counts[Outcome.FAILED], counts[Outcome.CANNOT_TELL]
    if outcome is Outcome.CANNOT_TELL:
        return f"Cannot tell: none of {len(judgements)} limits exceeded, but {unknown} cannot be judged."
    also = f", {unknown} cannot be judged" if unknown else ""
    return f"FAILED: {failed} of {len(judgements)} limits exceeded{also}."


def table(traces: Sequence[tuple[str, Record]], judgements: Sequence[Judgement]) -> list[str]:
    """Return what each trace is, a row for each judgement with its reason below it, and the sum."""
    rows = [HEADS, *map(_row, judgements)]
    rows = [row[:-1] for row in rows] if all(judgement.before is None for judgement in judgements) else rows
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line(row, widths) for row in rows]
    shown = [lines[0]]
    for judgement, line in zip(judgements, lines[1:], strict=True):
        shown += [line, *wrapped(INDENT, judgement.why)]
    heads = [f"{name}: {_extent(record)}" for name, record in traces]
    return [*heads, "", *shown, "", told(overall(judgements), judgements)]


def _row(judgement: Judgement) -> tuple[str, ...]:
    mark = MARKS[judgement.outcome]
    return mark, judgement.limit, judgement.of, judgement.found, judgement.allowed, judgement.before or ""


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    widths = (len(INDENT) - 2, *widths[1:])
    return "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def _extent(record: Record) -> str:
    done = record.finished.total
    requests = "requests unknown" if done is None else f"{done:,.0f} requests finished"
    return f"{record.samples:,} samples over {duration(record.span_seconds)}, {requests}"


def document(traces: Sequence[tuple[str, Record]], judgements: Sequence[Judgement]) -> dict[str, Any]:
    """Return what --json prints; None is what is unknown, or was not given."""
    (trace, *others) = [_summary(name, record) for name, record in traces]
    return {
        "outcome": overall(judgements),
        "trace": trace,
        "baseline": others[0] if others else None,
        "limits": [_judged(judgement) for judgement in judgements],
    }


def _summary(name: str, record: Record) -> dict[str, Any]:
    return {
        "file": name,
        "samples": record.samples,
        "span_seconds": record.span_seconds,
        "requests_finished": record.finished.total,
        "engine_restarts": record.restarts,
    }


def _judged(judgement: Judgement) -> dict[str, Any]:
    return {
        "limit": judgement.limit,
        "of": judgement.of or None,
        "outcome": judgement.outcome,
        "unit": judgement.unit,
        "value": judgement.value,
        "most": judgement.most,
        "least": judgement.least,
        "baseline": judgement.baseline,
        "why": judgement.why or None,
    }
