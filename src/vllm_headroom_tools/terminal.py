"""Text for people: broken into lines, and on a terminal drawn by rich with coloured words."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


STYLES: Final = {
    "NO GO": "bold red",
    "NOT GOOD": "bold red",
    "FAILED": "bold red",
    "MISSING": "bold red",
    "LEAKING": "bold red",
    "OUT OF MEMORY": "bold red",
    "ALARM": "bold red",
    "CANNOT TELL": "yellow",
    "NOT KNOWN": "yellow",
    "WARNING": "yellow",
    "unknown": "yellow",
    "skipped": "yellow",
    "cannot tell": "yellow",
    "GO": "green",
    "GOOD": "green",
    "OK": "green",
    "ok": "green",
    "passed": "green",
}
"""The words that commands write in capitals, and the marks at the beginning of a line.

The colour only repeats them.
"""


def _match_styled(word: str) -> str:
    """Return the pattern of a word with a style: capitals anywhere, a mark only at the start."""
    if word.isupper():
        return rf"\b{word}\b".replace(" ", r"\s+")
    return f"^{word}(?=  )"


_STYLED_WORDS: Final = re.compile("|".join(map(_match_styled, STYLES)))

_LEFT_COLUMNS: Final = re.compile(r" *(?:\S+(?: \S+)* {2,}){0,2}")
"""A mark and a name: when the line is broken, it continues below what follows them."""

_MAX_INDENT: Final = 30


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream writes to a terminal that knows more than lines."""
    return stream.isatty() and os.environ.get("TERM") not in {"dumb", "unknown"}


def build_console(stream: TextIO) -> Console:
    """Build what draws on a terminal and takes our words as they are.

    It respects NO_COLOR (no-color.org).
    """
    from rich.console import Console  # noqa: PLC0415 - 60 modules, which only a terminal needs

    return Console(file=stream, markup=False, emoji=False, highlight=False)


def render_line(line: str, stream: TextIO, style: str = "") -> str:
    """Return a line as a stream shows it: on a terminal wrapped and with coloured words."""
    if not is_terminal(stream):
        return line
    console = build_console(stream)
    with console.capture() as captured:
        console.print(wrap_line(line, console.width), style=style, soft_wrap=True, end="")
    return captured.get()


def wrap_line(line: str, columns: int) -> Text:
    """Return a line with its words coloured; a long one continues below its last column."""
    from rich.text import Text  # noqa: PLC0415 - see above

    if len(line) > columns:
        left_columns = _LEFT_COLUMNS.match(line)
        left_width = len(left_columns[0]) if left_columns else 0
        indent = min(left_width, _MAX_INDENT, columns // 2) or 2
        # Not rich's own wrapping: it has no indent, and breaks what has no blank, as an address
        # that is to be copied.
        line = textwrap.fill(
            line,
            columns,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    text = Text(line)
    text.highlight_regex(_STYLED_WORDS, lambda words: STYLES[" ".join(words.split())])
    return text


TEXT_WIDTH: Final = 110
"""The columns of a text, unless the terminal has fewer."""

HEAD_WIDTH: Final = 9
"""The columns of the words on the left of a report: what was observed, what to do."""

NO_SIDECAR: Final = "check that vllm-headroom runs there, port 9839 unless it is set otherwise"


def wrap_text(head: str, body: str, *, indent: int | None = None) -> list[str]:
    """Return the lines of a text behind a head.

    Those after the first are indented as far as the head, or by `indent`.
    """
    width = TEXT_WIDTH
    if is_terminal(sys.stdout):
        width = min(TEXT_WIDTH, build_console(sys.stdout).width)
    if indent is None:
        indent = len(head)
    return textwrap.wrap(
        body,
        width,
        initial_indent=head,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def wrap_headed(head: str, body: str) -> list[str]:
    """Return the lines of a text behind a word; all words of a report are in one column."""
    return wrap_text(f"   {head:<{HEAD_WIDTH - 3}}", body)


def join_paragraphs(paragraphs: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of those paragraphs that have any, with an empty line between them."""
    is_first = True
    for paragraph in paragraphs:
        lines = list(paragraph)
        if not lines:
            continue
        if not is_first:
            yield ""
        yield from lines
        is_first = False


BLOCKS: Final = " ▁▂▃▄▅▆▇█"
STEPS_PER_ROW: Final = len(BLOCKS) - 1

Point = Sequence[Any]
"""Seconds and a value, None for a gap."""

Pick = Callable[[Iterable[float]], float]
"""Returns the value that represents several."""


def draw_bars(
    curve: Sequence[Point],
    width: int,
    rows: int,
    *,
    ends: tuple[float, float] | None = None,
    pick: Pick = min,
) -> list[str]:
    """Return the rows of a chart with a bar for each column.

    A bar shows what `pick` takes of the values in its stretch of time, else the value before it; a
    gap is blank. `ends` are the values of the lowest and the highest bar; without them zero, and
    the highest value there is.
    """
    columns = _pick_columns(sorted(curve, key=lambda point: float(point[0])), width, pick)
    if ends is None:
        highest = max((value for value in columns if value is not None), default=0.0)
        ends = (0.0, highest)
    low, high = ends
    span = (high - low) or 1.0
    heights = []
    for value in columns:
        if value is None:
            heights.append(0)
        else:
            steps = round(STEPS_PER_ROW * rows * (value - low) / span)
            heights.append(max(1, steps))  # 0 is a gap
    lines = []
    for row in reversed(range(rows)):
        row_heights = [height - STEPS_PER_ROW * row for height in heights]
        blocks = [BLOCKS[min(STEPS_PER_ROW, max(0, height))] for height in row_heights]
        lines.append("".join(blocks).rstrip())
    return lines


def _pick_columns(curve: Sequence[Point], width: int, pick: Pick) -> list[float | None]:
    """Return the value of each column, None for a gap; no columns for an empty curve."""
    if not curve:
        return []
    times = [float(seconds) for seconds, _ in curve]
    duration_seconds = times[-1] - times[0]
    edges = [
        bisect_right(times, times[0] + duration_seconds * column / width)
        for column in range(1, width)
    ]
    columns: list[float | None] = []
    for start, end in pairwise((0, *edges, len(curve))):
        # A stretch without points shows the last point before it.
        stretch = curve[min(start, end - 1) : end]
        values = [float(value) for _, value in stretch if value is not None]
        columns.append(pick(values) if values else None)
    return columns
