"""Show the progress of a load on standard error."""

import sys
from math import inf
from typing import TYPE_CHECKING, Final

from vllm_headroom_tools.cli import write_note
from vllm_headroom_tools.load.stream import Outcome
from vllm_headroom_tools.load.tally import Tally
from vllm_headroom_tools.progress import start_bar, update_bar
from vllm_headroom_tools.terminal import is_terminal

if TYPE_CHECKING:
    from rich.progress import Progress

LINE_SECONDS: Final = 10.0
"""Our choice: the time between two lines if a progress bar cannot be drawn."""


class Screen:
    """Shows the progress of each step.

    Progress is a bar on a terminal, and lines elsewhere.
    """

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._next_line_seconds = inf

    def begin(self, title: str, seconds: float) -> None:
        """Begin showing a step that takes this many seconds."""
        if is_terminal(sys.stderr):
            self._bar = start_bar(title, seconds, transient=False)
        else:
            self._next_line_seconds = LINE_SECONDS
            write_note(f"{title}, {seconds:g} s")

    def show(self, tally: Tally, elapsed_seconds: float, *, is_over: bool = False) -> None:
        """Show the current step's progress: update the bar, or write a line every LINE_SECONDS.

        Shows nothing between steps. When a step is over, its bar stays on the screen.
        """
        text = _format_tally(tally)
        if self._bar is not None:
            update_bar(self._bar, elapsed_seconds, text)
            if is_over:
                self._bar.stop()
                self._bar = None
        elif is_over:
            self._next_line_seconds = inf
            write_note(f"  {elapsed_seconds:3.0f} s  {text}; over")
        elif elapsed_seconds >= self._next_line_seconds:
            self._next_line_seconds += LINE_SECONDS
            write_note(f"  {elapsed_seconds:3.0f} s  {text}")


def _format_tally(tally: Tally) -> str:
    """Return how many requests are open, succeeded, or ended without success."""
    succeeded = tally.outcomes[Outcome.SUCCEEDED]
    out_of_memory = tally.outcomes[Outcome.OUT_OF_MEMORY]
    failed = tally.outcomes.total() - succeeded - out_of_memory
    text = f"{tally.open_requests} open, {succeeded} succeeded, {failed} not"
    if out_of_memory:
        text += f", {out_of_memory} OUT OF MEMORY"
    return text
