"""Progress bars on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final, TypeVar

from vllm_headroom_tools.terminal import build_console, is_terminal

if TYPE_CHECKING:
    from rich.progress import Progress


Item = TypeVar("Item")

BAR_DELAY_SECONDS: Final = 2.0
"""What takes no longer needs no bar."""

REDRAW_SECONDS: Final = 0.2


def track(
    items: Iterable[Item],
    description: str,
    total: float | None,
    size: Callable[[Item], float],
    *,
    patience_seconds: float = BAR_DELAY_SECONDS,
) -> Iterator[Item]:
    """Yield the items, and show on a terminal how much of the `total` is done.

    The total is None where it is not known.
    """
    done = 0.0
    draw_at_seconds = time.monotonic() + patience_seconds
    bar = None
    can_draw = is_terminal(sys.stderr)
    try:
        for item in items:
            yield item
            done += size(item)
            if can_draw and time.monotonic() >= draw_at_seconds:
                draw_at_seconds = time.monotonic() + REDRAW_SECONDS
                bar = bar or start_bar(description, total)
                update_bar(bar, done)
    finally:
        if bar is not None:
            bar.stop()


def track_lines(lines: Iterator[bytes], total_bytes: int | None) -> Iterator[bytes]:
    """Yield the lines of a trace, and show how much of it was read."""
    return track(lines, "Reading the trace", total_bytes, len)


def start_bar(description: str, total: float | None, *, transient: bool = True) -> Progress:
    """Start a bar; what is written to standard error goes above it until it is stopped."""
    from rich.progress import (  # noqa: PLC0415 - without a terminal there is no bar
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
    )

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        TaskProgressColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        BarColumn(),  # gives way before the others where there is little room
        console=build_console(sys.stderr),
        auto_refresh=False,
        transient=transient,
        redirect_stdout=False,
    )
    bar.add_task(description, total=total, note="")
    bar.start()
    bar.console.show_cursor()  # a signal may end the process at any time, and would leave none
    return bar


def update_bar(bar: Progress, done: float, note: str = "") -> None:
    """Draw a bar as far as it has come."""
    bar.update(bar.task_ids[0], completed=done, note=note, refresh=True)
