"""Progress bars on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Final, TypeVar

from vllm_headroom_tools.terminal import build_console, is_terminal

if TYPE_CHECKING:
    from rich.progress import Progress


Item = TypeVar("Item")

BAR_DELAY_SECONDS: Final = 2.0
"""Our choice: a bar appears only if the work takes longer than this."""

REDRAW_SECONDS: Final = 0.2
"""Our choice: the minimum time between two redraws of a bar."""


def track(
    items: Iterable[Item],
    description: str,
    total: float | None,
    size: Callable[[Item], float],
    *,
    patience_seconds: float = BAR_DELAY_SECONDS,
) -> Generator[Item, None, None]:
    """Yield the items, and show on a terminal how much of `total` is done.

    `size` returns how much an item contributes to the total. `total` is None if it is unknown. The
    bar appears after `patience_seconds`.
    """
    done = 0.0
    draw_at_seconds = time.monotonic() + patience_seconds
    bar = None
    can_draw = is_terminal(sys.stderr)
    try:
        for item in items:
            # An item is done when the caller requests the next item.
            yield item
            done += size(item)
            if can_draw and time.monotonic() >= draw_at_seconds:
                draw_at_seconds = time.monotonic() + REDRAW_SECONDS
                bar = bar or start_bar(description, total)
                update_bar(bar, done)
    finally:
        if bar is not None:
            bar.stop()


def track_lines(lines: Iterator[bytes], total_bytes: int | None) -> Generator[bytes, None, None]:
    """Yield the lines of a trace, and show the progress on a terminal.

    `total_bytes` is None if the size is unknown, as with a pipe.
    """
    return track(lines, "Reading the trace", total_bytes, len)


def start_bar(description: str, total: float | None, *, transient: bool = True) -> Progress:
    """Start a bar on standard error and return it.

    Until the bar is stopped, other lines on standard error appear above it. A `transient` bar is
    erased when it stops. Without a `total`, the bar only shows that work is in progress.
    """
    from rich.progress import (  # noqa: PLC0415 - only a terminal gets a bar
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
    )

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        TaskProgressColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        BarColumn(),  # This column is last, so that a narrow terminal cuts it off first.
        console=build_console(sys.stderr),
        auto_refresh=False,
        transient=transient,
        redirect_stdout=False,
    )
    bar.add_task(description, total=total, note="")
    bar.start()
    # rich hides the cursor. A signal may end the process before rich shows it again.
    bar.console.show_cursor()
    return bar


def update_bar(bar: Progress, done: float, note: str = "") -> None:
    """Draw a bar with `done` completed, and `note` next to its percentage."""
    bar.update(bar.task_ids[0], completed=done, note=note, refresh=True)
