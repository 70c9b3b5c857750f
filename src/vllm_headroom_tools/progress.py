"""Progress bars on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final, TypeVar

from vllm_headroom_tools.terminal import console, is_terminal

if TYPE_CHECKING:
    from rich.progress import Progress


Item = TypeVar("Item")

PATIENCE_SECONDS: Final = 2.0
"""What takes no longer needs no bar."""

BETWEEN_SECONDS: Final = 0.2


def track(
    items: Iterable[Item],
    what: str,
    whole: float | None,
    size: Callable[[Item], float],
    *,
    patience_seconds: float = PATIENCE_SECONDS,
) -> Iterator[Item]:
    """Yield the items, and show on a terminal how much of the `whole` (None: not known) is done."""
    done, due, drawn = 0.0, time.monotonic() + patience_seconds, None
    can_draw = is_terminal(sys.stderr)
    try:
        for item in items:
            yield item
            done += size(item)
            if can_draw and time.monotonic() >= due:
                due = time.monotonic() + BETWEEN_SECONDS
                drawn = drawn or start_bar(what, whole)
                update_bar(drawn, done)
    finally:
        if drawn is not None:
            drawn.stop()


def track_lines(lines: Iterator[bytes], whole_bytes: int | None) -> Iterator[bytes]:
    """Yield the lines of a trace, and show how much of it was read."""
    return track(lines, "Reading the trace", whole_bytes, len)


def start_bar(what: str, whole: float | None, *, transient: bool = True) -> Progress:
    """Return a bar that has begun; what is written to standard error goes above it until it is stopped."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn  # noqa: PLC0415 - no terminal, no bar

    drawn = Progress(
        TextColumn("{task.description}", markup=False),
        TaskProgressColumn(),
        TextColumn("{task.fields[more]}", markup=False),
        BarColumn(),  # the first to give way where there is little room
        console=console(sys.stderr),
        auto_refresh=False,
        transient=transient,
        redirect_stdout=False,
    )
    drawn.add_task(what, total=whole, more="")
    drawn.start()
    drawn.console.show_cursor()  # a signal may end the process at any time, and would leave none
    return drawn


def update_bar(drawn: Progress, done: float, more: str = "") -> None:
    """Draw a bar as far as it has come."""
    drawn.update(drawn.task_ids[0], completed=done, more=more, refresh=True)
