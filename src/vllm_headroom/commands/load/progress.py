"""How far the load has come, live: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
from math import inf
from typing import TYPE_CHECKING, Final

from vllm_headroom.commands.cli import tell
from vllm_headroom.commands.load.stream import Outcome
from vllm_headroom.commands.load.tally import Tally
from vllm_headroom.commands.progress import bar, move
from vllm_headroom.commands.terminal import draws

if TYPE_CHECKING:
    from rich.progress import Progress

LINE_SECONDS: Final = 10.0


class Screen:
    """Shows on standard error how far each step has come: a bar on a terminal, a line every ten seconds elsewhere."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._next_seconds = inf

    def begin(self, title: str, seconds: float) -> None:
        """Show that a step begins."""
        if draws(sys.stderr):
            self._bar = bar(title, seconds, transient=False)
            return
        self._next_seconds = LINE_SECONDS
        tell(f"{title}, {seconds:g} s")

    def show(self, tally: Tally, elapsed_seconds: float) -> None:
        """Show how far it has come, while there is a step, and if it is time for a line."""
        if self._bar is not None:
            move(self._bar, elapsed_seconds, _counts(tally))
        elif elapsed_seconds >= self._next_seconds:
            self._next_seconds += LINE_SECONDS
            tell(f"  {elapsed_seconds:3.0f} s  {_counts(tally)}")

    def end(self, tally: Tally, elapsed_seconds: float) -> None:
        """Show what it came to; its bar stays, full unless the step was cut short."""
        if self._bar is None:
            self._next_seconds = inf
            tell(f"  {elapsed_seconds:3.0f} s  {_counts(tally)}; over")
            return
        self.show(tally, elapsed_seconds)
        self._bar.stop()
        self._bar = None


def _counts(tally: Tally) -> str:
    good = tally.outcomes[Outcome.SUCCEEDED]
    out_of_memory = tally.outcomes[Outcome.OUT_OF_MEMORY]
    bad = tally.outcomes.total() - good - out_of_memory
    told = f"{tally.open} open, {good} succeeded, {bad} not"
    return f"{told}, {out_of_memory} OUT OF MEMORY" if out_of_memory else told
