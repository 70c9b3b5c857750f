"""How far the load has come, live: a bar where rich is installed and this is a terminal, lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Final

from vllm_headroom.commands.cli import tell
from vllm_headroom.commands.load.answer import Outcome
from vllm_headroom.commands.load.tally import Tally

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_SECONDS: Final = 10.0


@contextmanager
def screen() -> Iterator[Lines | Bar]:
    """Yield what shows the progress on standard error while the block runs."""
    bar = _bar() if sys.stderr.isatty() else None
    if bar is None:
        yield Lines()
        return
    with bar:
        yield Bar(bar)


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

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def begin(self, title: str, seconds: float) -> None:
        """Add the step's bar."""
        self._task = self._progress.add_task(title, counts="", total=seconds)

    def show(self, tally: Tally, elapsed_seconds: float) -> None:
        """Move the bar."""
        if self._task is not None:
            self._progress.update(self._task, completed=elapsed_seconds, counts=_counts(tally), refresh=True)

    def end(self, tally: Tally, elapsed_seconds: float) -> None:
        """Leave the bar as it ended: full, unless the step was cut short."""
        self.show(tally, elapsed_seconds)


def _counts(tally: Tally) -> str:
    good = tally.outcomes[Outcome.SUCCEEDED]
    out_of_memory = tally.outcomes[Outcome.OUT_OF_MEMORY]
    bad = tally.outcomes.total() - good - out_of_memory
    told = f"{tally.open} open, {good} succeeded, {bad} not"
    return f"{told}, {out_of_memory} OUT OF MEMORY" if out_of_memory else told


def _bar() -> Progress | None:
    try:
        from rich.console import Console  # noqa: PLC0415 - an optional extra
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415 - the same
    except ModuleNotFoundError:
        return None
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[counts]}"))
    return Progress(*columns, console=Console(stderr=True), auto_refresh=False)
