"""Judgements as a table for people, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from vllm_headroom.commands.check.judgement import Judgement, overall
from vllm_headroom.commands.check.record import Record
from vllm_headroom.commands.terminal import wrapped
from vllm_headroom.commands.verdict import Verdict
from vllm_headroom.units import duration

MARKS: Final = {Verdict.GOOD: "passed", Verdict.NOT_GOOD: "FAILED", Verdict.CANNOT_TELL: "cannot tell"}
OUTCOMES: Final = {Verdict.GOOD: "passed", Verdict.NOT_GOOD: "failed", Verdict.CANNOT_TELL: "cannot_tell"}
"""The words of --json."""

HEADS: Final = ("", "limit", "of", "found", "at most", "baseline")
INDENT: Final = " " * 13
"""The width of the marks: a reason stands below the limit's name."""


def told(judgements: Sequence[Judgement]) -> str:
    """Return the sum in a line."""
    verdict = overall(judgements)
    counts = {each: sum(judgement.verdict is each for judgement in judgements) for each in Verdict}
    if verdict is Verdict.GOOD:
        return f"Passed: all {len(judgements)} limits kept."
    failed, unknown = counts[Verdict.NOT_GOOD], counts[Verdict.CANNOT_TELL]
    if verdict is Verdict.CANNOT_TELL:
        return f"Cannot tell: {unknown} of {len(judgements)} limits cannot be judged, {counts[Verdict.GOOD]} kept."
    also = f", {unknown} cannot be judged" if unknown else ""
    return f"FAILED: {failed} of {len(judgements)} limits exceeded{also}."


def table(traces: Sequence[tuple[str, Record]], judgements: Sequence[Judgement]) -> list[str]:
    """Return what each trace is, a row for each judgement with its reason below it, and the sum."""
    rows = [HEADS, *map(_row, judgements)]
    rows = rows if any(row[-1] for row in rows[1:]) else [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line(row, widths) for row in rows]
    shown = [lines[0]]
    for judgement, line in zip(judgements, lines[1:], strict=True):
        shown += [line, *wrapped(INDENT, judgement.why)]
    heads = [f"{name}: {_extent(record)}" for name, record in traces]
    return [*heads, "", *shown, "", told(judgements)]


def _row(judgement: Judgement) -> tuple[str, ...]:
    return MARKS[judgement.verdict], judgement.limit, judgement.of, *judgement.words


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
        "outcome": OUTCOMES[overall(judgements)],
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
        "outcome": OUTCOMES[judgement.verdict],
        "unit": judgement.unit,
        "value": judgement.value,
        "most": judgement.most,
        "least": judgement.least,
        "baseline": judgement.baseline,
        "why": judgement.why or None,
    }
