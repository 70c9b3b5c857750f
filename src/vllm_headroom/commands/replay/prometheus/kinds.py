"""What a kind of history is: one exporter's series for one side of a trace's sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from vllm_headroom.commands.replay.prometheus.api import Series

Value = tuple[Series, float]
"""A series and what it is at the time of the sample."""

Side = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The series one exporter has for one side of a sample; `side` is its key in a trace's line.

    `lead` are the names of which one is there wherever this exporter is scraped, `names` all that are read. Series that
    agree in name and in the labels of `identity` are the same thing, whatever the other labels, which their scrapes
    gave them. `has_start_time` is whether the start of the exporting process is the engine's.
    """

    side: str
    lead: tuple[str, ...]
    names: tuple[str, ...]
    identity: frozenset[str]
    sample: Callable[[Iterable[Value]], Side]
    has_start_time: bool = False

    @property
    def option(self) -> str:
        """The option of the command that narrows this side alone."""
        return "--match-gpu" if self.side == "gpus" else "--match-engine"
