"""Text for people, wrapped into lines.

On a terminal, rich renders the text with coloured words.
"""

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
    "FILLS": "bold red",
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
"""rich's style for each word that is coloured. These are words in capitals, and the marks at the
start of a line.

The colours do not carry any additional meaning.
"""


def _match_styled(word: str) -> str:
    """Return the pattern for a word in capitals or a mark that begins a line."""
    if word.isupper():
        return rf"\b{word}\b".replace(" ", r"\s+")
    return f"^{word}(?=  )"


_STYLED_WORDS: Final = re.compile("|".join(map(_match_styled, STYLES)))

_LEFT_COLUMNS: Final = re.compile(r" *(?:\S+(?: \S+)* {2,}){0,2}")
"""Matches the columns with the mark and the name. A wrapped line continues to the right of these
columns.
"""

_MAX_INDENT: Final = 30
"""Our choice: the maximum indent of a wrapped line, in columns."""


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can do more than print lines."""
    return stream.isatty() and os.environ.get("TERM") not in {"dumb", "unknown"}


def build_console(stream: TextIO) -> Console:
    """Build rich's console, with markup disabled so that our text is printed unchanged.

    The console respects NO_COLOR (no-color.org).
    """
    from rich.console import Console  # noqa: PLC0415 - 60 modules, which only a terminal needs

    return Console(file=stream, markup=False, emoji=False, highlight=False)


def render_line(line: str, stream: TextIO, style: str = "") -> str:
    """Return a line for a stream: wrapped and coloured for a terminal, otherwise unchanged.

    `style` is rich's style for the whole line.
    """
    if not is_terminal(stream):
        return line
    console = build_console(stream)
    with console.capture() as captured:
        console.print(wrap_line(line, console.width), style=style, soft_wrap=True, end="")
    return captured.get()


def wrap_line(line: str, columns: int) -> Text:
    """Return a line with its words coloured.

    A line that is longer than `columns` is wrapped. Its continuation is indented to the column
    where the line's text starts.
    """
    from rich.text import Text  # noqa: PLC0415 - see above

    if len(line) > columns:
        left_columns = _LEFT_COLUMNS.match(line)
        left_width = len(left_columns[0]) if left_columns else 0
        indent = min(left_width, _MAX_INDENT, columns // 2) or 2
        # rich's own wrapping does not indent, and breaks words that users want to copy, such as
        # addresses.
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
"""Our choice: the width of text in columns, unless the terminal is narrower."""

HEAD_WIDTH: Final = 9
"""The width in characters of a report's left column, which contains the paragraph headings."""

NO_SIDECAR: Final = "check that vllm-headroom runs there, port 9839 unless it is set otherwise"


def wrap_text(head: str, body: str, *, indent: int | None = None) -> list[str]:
    """Wrap a text that begins with `head`.

    Continuation lines are indented by `indent` columns. If `indent` is None, they are indented by
    the length of the head.
    """
    width = TEXT_WIDTH
    # A narrow terminal would wrap the lines again at arbitrary positions.
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
    """Wrap a text to the right of a word in a report's left column."""
    return wrap_text(f"   {head:<{HEAD_WIDTH - 4}} ", body)


def join_paragraphs(paragraphs: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of all non-empty paragraphs, separated by empty lines."""
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
"""The number of bar heights within one row of text."""

Point = Sequence[Any]
"""A time in seconds and a value; None marks a gap."""

Pick = Callable[[Iterable[float]], float]
"""Selects one of several values, such as the minimum or maximum."""


def draw_bars(
    curve: Sequence[Point],
    width: int,
    rows: int,
    *,
    ends: tuple[float, float] | None = None,
    pick: Pick = min,
) -> list[str]:
    """Return the rows of a bar chart with one bar per column, top row first.

    Each column covers an equal part of the curve's time span. Its bar shows what `pick` returns for
    the values in this part. If the part has no values, the bar shows the last earlier value. A gap
    is blank. `ends` are the values of the lowest and the highest bar. By default, the ends are zero
    and the maximum value. An empty curve results in empty rows.
    """
    columns = _pick_columns(sorted(curve, key=lambda point: float(point[0])), width, pick)
    if ends is None:
        highest = max((value for value in columns if value is not None), default=0.0)
        ends = (0.0, highest)
    low, high = ends
    # The range of a flat curve is 0, which cannot be a divisor. With 1 as the divisor, all of its
    # bars have the lowest height.
    span = (high - low) or 1.0
    heights = []
    for value in columns:
        if value is None:
            heights.append(0)
        else:
            steps = round(STEPS_PER_ROW * rows * (value - low) / span)
            heights.append(max(1, steps))  # A bar of height 0 would look like a gap.
    lines = []
    for row in reversed(range(rows)):
        row_heights = [height - STEPS_PER_ROW * row for height in heights]
        blocks = [BLOCKS[min(STEPS_PER_ROW, max(0, height))] for height in row_heights]
        lines.append("".join(blocks).rstrip())
    return lines


def _pick_columns(curve: Sequence[Point], width: int, pick: Pick) -> list[float | None]:
    """Return the value of each column, or None for a gap.

    An empty curve has no columns.
    """
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
        # A stretch of the curve without points shows the last point before the stretch.
        stretch = curve[min(start, end - 1) : end]
        values = [float(value) for _, value in stretch if value is not None]
        columns.append(pick(values) if values else None)
    return columns
