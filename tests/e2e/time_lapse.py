"""A simulated clock so many times as fast as the machine's, and the shipped configuration that runs by it.

All durations are divided by the factor, and `time()` in a rule reads the simulated clock. So numbers of seconds in an
expression, such as `time() - X > 840`, and timestamps in series keep their meaning.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

UNIT_SECONDS: Final = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
DURATION: Final = r"\d+(?:ms|[smhdw])"
SETTING: Final = re.compile(
    r"((?:for|keep_firing_for|(?:group|repeat|scrape|evaluation)_(?:wait|interval)): )"
    rf"({DURATION})\b"
)
WINDOW: Final = re.compile(rf"\[({DURATION})(?::({DURATION}))?\]")
OFFSET: Final = re.compile(rf"\boffset ({DURATION})\b")
SLOPE: Final = re.compile(r"\b((?:rate|deriv)\([^()]+\))")
"""What a function gives per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLapse:
    """A clock that goes `factor` times as fast from `origin_seconds` on, both in Unix time."""

    factor: float
    origin_seconds: float

    def simulated_seconds(self, real_seconds: float) -> float:
        """Return what the simulated clock shows."""
        return (real_seconds - self.origin_seconds) * self.factor + self.origin_seconds

    def shorten(self, duration: str) -> str:
        """Return a duration divided by the factor, as Prometheus and Alertmanager write it."""
        amount, unit = re.fullmatch(r"(\d+)([a-z]+)", duration).groups()  # type: ignore[union-attr]
        return f"{round(int(amount) * UNIT_SECONDS[unit] / self.factor * 1000)}ms"

    def shorten_settings(self, text: str) -> str:
        """Return a configuration or rules whose settings take less time."""
        return SETTING.sub(lambda match: match[1] + self.shorten(match[2]), text)

    def shorten_rules(self, text: str) -> str:
        """Return rules that see the same on the simulated clock, in their annotations too."""
        text = self.shorten_settings(text)
        text = WINDOW.sub(self._shorten_window, text)
        text = OFFSET.sub(lambda match: f"offset {self.shorten(match[1])}", text)
        text = SLOPE.sub(rf"(\1 / {self.factor:g})", text)
        clock = f"((time() - {self.origin_seconds:.3f}) * {self.factor:g} + {self.origin_seconds:.3f})"
        return text.replace("time()", clock)

    def _shorten_window(self, match: re.Match[str]) -> str:
        step = f":{self.shorten(match[2])}" if match[2] else ""
        return f"[{self.shorten(match[1])}{step}]"
