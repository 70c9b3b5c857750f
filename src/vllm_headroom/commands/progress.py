"""How far something long has come: a line on a terminal that is written over, and gone when it is done."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from vllm_headroom.commands.bars import bar
from vllm_headroom.commands.terminal import draws, terminal
from vllm_headroom.vocabulary import CONTROLS

Item = TypeVar("Item")

PATIENCE_SECONDS: Final = 2.0
"""What takes no longer needs no bar."""

BETWEEN_SECONDS: Final = 0.2
BAR_COLUMNS: Final = 30
UNKNOWN_COLUMNS: Final = 80


def followed(
    items: Iterable[Item],
    what: str,
    whole: float | None,
    size: Callable[[Item], float],
    *,
    patience_seconds: float = PATIENCE_SECONDS,
) -> Iterator[Item]:
    """Yield the items, and show on a terminal how much of the `whole` their sizes come to; None is not known."""
    done, due, is_drawn = 0.0, time.monotonic() + patience_seconds, False
    can_draw = draws(sys.stderr)
    try:
        for item in items:
            yield item
            done += size(item)
            if can_draw and time.monotonic() >= due:
                due, is_drawn = time.monotonic() + BETWEEN_SECONDS, True
                overwrite(what if whole is None else shown(what, done / whole if whole else 1.0))
    finally:
        if is_drawn:
            overwrite("")


def reading(lines: Iterator[bytes], whole_bytes: int | None) -> Iterator[bytes]:
    """Yield the lines of a trace, and show how much of it was read."""
    return followed(lines, "Reading the trace", whole_bytes, len)


def shown(what: str, share: float, more: str = "") -> str:
    """Return how far something is, and a bar behind it where there is room."""
    head = f"{what}  {min(share, 1.0):4.0%}  {f'{more}  ' if more else ''}"
    return f"{head}{bar(share, max(0, min(BAR_COLUMNS, _room() - len(head))))}".rstrip()


def overwrite(text: str) -> None:
    """Put a text into the terminal's last line, in the place of what stood there."""
    sys.stderr.write(f"\r{text.translate(CONTROLS)[: _room()]}\x1b[K")
    sys.stderr.flush()


def _room() -> int:
    """Return the columns of a line that the terminal does not go on with in the next."""
    return (terminal(sys.stderr).columns or UNKNOWN_COLUMNS) - 1
