"""What was measured, as one Markdown table."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

GENEROUS: Final = 5.0
"""A measurement this many times beyond its limit is a fault and fails; nearer ones are only marked in the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line; `met` is None where there is no limit."""

    what: str
    measured: str
    limit: str = ""
    met: bool | None = None

    def __str__(self) -> str:
        verdict = {None: "", True: "met", False: "**missed**"}[self.met]
        return f"| {self.what} | {self.measured} | {self.limit} | {verdict} |"


@dataclass(slots=True)
class Results:
    """The rows so far, in the order they were measured."""

    rows: list[Row] = field(default_factory=list)

    def note(self, title: str, measured: str) -> None:
        """Add a measurement without a limit."""
        self.rows.append(Row(what=title, measured=measured))

    def at_most(self, limit: float, title: str, value: float, unit: str) -> None:
        """Add a measurement with its upper limit."""
        self._limited(title, value, unit, f"≤ {limit:g}{unit}", met=value <= limit)
        assert value <= GENEROUS * limit, f"{title}: {value:.3g}{unit}"

    def at_least(self, limit: float, title: str, value: float, unit: str) -> None:
        """Add a measurement with its lower limit."""
        self._limited(title, value, unit, f"≥ {limit:g}{unit}", met=value >= limit)
        assert value >= limit / GENEROUS, f"{title}: {value:.3g}{unit}"

    def _limited(self, title: str, value: float, unit: str, limit: str, *, met: bool) -> None:
        self.rows.append(Row(what=title, measured=f"{value:.3g}{unit}", limit=limit, met=met))

    def table(self) -> str:
        """Return everything as Markdown, the machine first."""
        head = ("| measured | value | limit | |", "| --- | --- | --- | --- |")
        return "\n".join((f"{_machine()}\n", *head, *map(str, self.rows)))


def _machine() -> str:
    cores = len(os.sched_getaffinity(0))
    load = ", ".join(f"{average:.1f}" for average in os.getloadavg())
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return f"{_cpu_model()}, {cores} cores, Linux, {python}; load average at the end: {load}"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
