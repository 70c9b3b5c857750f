"""The span and the matchers of a history, from the command line."""

from __future__ import annotations

import re
from datetime import datetime
from math import inf
from typing import Final

from msgspec import Struct

from vllm_headroom.trace.parse import BadInput
from vllm_headroom.units import NUMBER, parse_duration
from vllm_headroom_tools.options import Value, bounded

_MATCHER: Final = re.compile(r"\s*([a-zA-Z_]\w*)\s*(=~|!~|!=|=)\s*(.*?)\s*", re.DOTALL)
_QUOTED: Final = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'|`[^`]*`')
_MS: Final = 1000


class TimeSpan(Struct, frozen=True, kw_only=True):
    """Evenly spaced times in milliseconds since the epoch, including `end_ms` if a step ends there."""

    start_ms: int
    end_ms: int
    step_ms: int

    @property
    def length_ms(self) -> int:
        """The length of the span."""
        return self.end_ms - self.start_ms

    def times(self) -> range:
        """Return every time of the span."""
        return range(self.start_ms, self.end_ms + 1, self.step_ms)

    def pages(self, most_steps: int) -> list[TimeSpan]:
        """Return the span in parts of at most `most_steps` times each, none twice."""
        stride = max(1, most_steps) * self.step_ms
        starts = range(self.start_ms, self.end_ms + 1, stride)
        return [
            TimeSpan(start_ms=start, end_ms=min(start + stride - self.step_ms, self.end_ms), step_ms=self.step_ms)
            for start in starts
        ]


Time = tuple[bool, float]
"""Whether it is relative to now, and the seconds from now or from the epoch."""


def _parse_time(text: str) -> Time:
    if text == "now":
        return True, 0.0
    if text.startswith("-"):
        return True, -parse_duration(text[1:])
    if re.fullmatch(NUMBER, text):
        return False, float(text)
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError
    return False, moment.timestamp()


def _parse_matcher(text: str) -> str:
    """Parse a label matcher, adding the quotes that a shell removes."""
    found = _MATCHER.fullmatch(text)
    if found is None:
        raise ValueError
    label, operator, value = found.groups()
    if not _QUOTED.fullmatch(value):
        value = '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    return f"{label}{operator}{value}"


TIME: Final = Value(
    read=_parse_time, accepts="2026-01-31T08:00:00Z, seconds since the epoch, now, or a time ago such as -24h"
)
STEP: Final = Value(read=bounded(parse_duration, 1, inf), accepts="a duration from 1s on such as 15s, 1m or 1h")
MATCHER: Final = Value(read=_parse_matcher, accepts='label="value", with =, !=, =~ or !~')


def build_span(start: Time | None, end: Time, step_seconds: float, now_seconds: float) -> TimeSpan:
    """Build the span of --start, --end and --step; raises BadInput."""
    if start is None:
        raise BadInput("--from-prometheus needs --start: a time such as 2026-01-31T08:00:00Z, or -24h")
    start_ms, end_ms = (round((seconds + now_seconds * from_now) * _MS) for from_now, seconds in (start, end))
    if not 0 <= start_ms < end_ms:
        raise BadInput("--start is not a time before --end")
    return TimeSpan(start_ms=start_ms, end_ms=end_ms, step_ms=round(step_seconds * _MS))
