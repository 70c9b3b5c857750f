"""How far the load has come, live: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
from math import inf
from typing import TYPE_CHECKING, Final

from vllm_headroom.commands.cli import tell
from vllm_headroom.commands.load.answer import Outcome
from vllm_headroom.commands.load.tally import Tally
from vllm_headroom.commands.progress import bar, move
from vllm_headroom.commands.terminal import draws

if TYPE_CHECKING:
    from rich.progress import Progress

LINE_SECONDS: Final = 10.0


def screen() -> Lines | Bar:
    """Return what shows the progress on standard error."""
    return Bar() if draws(sys.stderr) else Lines()


class Lines:
    """A line when a step begins, every ten seconds of it, and when it ends."""

    def __init__(self) -> None:
        self._next_seconds = LINE_SECONDS

    def begin(self, title: str, seconds: float) -> None:
        """Say that a step begins."""
        self._next_seconds = LINE_SECONDS
        tell(f"{title}, {seconds:g} s")

    def show(self, tally: Tally, elapsed_seconds: float) -> None:
        """Say how far it has come, if it is time to."""
        if elapsed_seconds >= self._next_seconds:
            self._next_seconds += LINE_SECONDS
            tell(f"  {elapsed_seconds:3.0f} s  {_counts(tally)}")

    def end(self, tally: Tally, elapsed_seconds: float) -> None:
        """Say what it came to, and nothing more of it."""
        self._next_seconds = inf
        tell(f"  {elapsed_seconds:3.0f} s  {_counts(tally)}; over")


class Bar:
    """A bar for each step."""

    def __init__(self) -> None:
        self._bar: Progress | None = None

    def begin(self, title: str, seconds: float) -> None:
        """Draw the step's bar."""
        self._bar = bar(title, seconds, transient=False)

    def show(self, tally: Tally, elapsed_seconds: float) -> None:
        """Move the bar, while a step has one."""
        if self._bar is not None:
            move(self._bar, elapsed_seconds, _counts(tally))

    def end(self, tally: Tally, elapsed_seconds: float) -> None:
        """Leave the bar as it ended: full, unless the step was cut short."""
        self.show(tally, elapsed_seconds)
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _counts(tally: Tally) -> str:
    good = tally.outcomes[Outcome.SUCCEEDED]
    out_of_memory = tally.outcomes[Outcome.OUT_OF_MEMORY]
    bad = tally.outcomes.total() - good - out_of_memory
    told = f"{tally.open} open, {good} succeeded, {bad} not"
    return f"{told}, {out_of_memory} OUT OF MEMORY" if out_of_memory else told
