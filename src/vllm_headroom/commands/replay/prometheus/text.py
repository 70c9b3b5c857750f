"""What the command line says of a history: the span of time and which series."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Final

from msgspec import Struct

from vllm_headroom.trace.errors import BadInput
from vllm_headroom.units import NUMBER, duration_seconds

_MATCHER: Final = re.compile(r"\s*([a-zA-Z_]\w*)\s*(=~|!~|!=|=)\s*(.*?)\s*", re.DOTALL)
_QUOTED: Final = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'|`[^`]*`')
_MS: Final = 1000


class Span(Struct, frozen=True, kw_only=True):
    """Evenly spaced times, with `end_ms` when a step ends there; in milliseconds since the epoch, as in Prometheus."""

    start_ms: int
    end_ms: int
    step_ms: int

    @property
    def length_ms(self) -> int:
        """How long it is."""
        return self.end_ms - self.start_ms

    def times(self) -> range:
        """Return every time of the span."""
        return range(self.start_ms, self.end_ms + 1, self.step_ms)

    def pages(self, most_steps: int) -> list[Span]:
        """Return the span in parts of at most `most_steps` times each, none twice."""
        stride = max(1, most_steps) * self.step_ms
        starts = range(self.start_ms, self.end_ms + 1, stride)
        return [
            Span(start_ms=start, end_ms=min(start + stride - self.step_ms, self.end_ms), step_ms=self.step_ms)
            for start in starts
        ]


def span_between(start: str | None, end: str, step: str, now_seconds: float) -> Span:
    """Return the span that --start, --end and --step say, or raise BadInput."""
    if start is None:
        raise BadInput("--from-prometheus needs --start: a time such as 2026-01-31T08:00:00Z, or -24h")
    step_ms = round(_seconds("--step", step) * _MS)
    start_ms, end_ms = (
        round(_time(option, text, now_seconds) * _MS) for option, text in (("--start", start), ("--end", end))
    )
    if step_ms < _MS:
        raise BadInput(f"--step {step}: history is read at steps of at least 1s")
    if not 0 <= start_ms < end_ms:
        raise BadInput(f"--start {start} is not a time before --end {end}")
    return Span(start_ms=start_ms, end_ms=end_ms, step_ms=step_ms)


def matcher(option: str, text: str) -> str:
    """Return the label matcher as PromQL has it, with the quotes that a shell takes away, or raise BadInput."""
    found = _MATCHER.fullmatch(text)
    if found is None:
        raise BadInput(f'{option} {text}: write it as label="value", with =, !=, =~ or !~')
    label, operator, value = found.groups()
    if not _QUOTED.fullmatch(value):
        value = '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    return f"{label}{operator}{value}"


def _time(option: str, text: str, now_seconds: float) -> float:
    if text == "now":
        return now_seconds
    if text.startswith("-"):
        return now_seconds - _seconds(option, text, sign="-")
    try:
        return float(text) if re.fullmatch(NUMBER, text) else _moment(text)
    except ValueError:
        advice = "write 2026-01-31T08:00:00Z, seconds since the epoch, now, or a time ago such as -24h"
        raise BadInput(f"{option} {text}: not a time, {advice}") from None


def _moment(text: str) -> float:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(text)
    return moment.timestamp()


def _seconds(option: str, text: str, *, sign: str = "") -> float:
    try:
        return duration_seconds(text.removeprefix(sign))
    except ValueError:
        raise BadInput(f"{option} {text}: not a duration, write {sign}15s, {sign}1m, {sign}24h or {sign}7d") from None
