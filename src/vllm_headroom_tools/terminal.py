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
    **dict.fromkeys(
        ("NO GO", "NOT GOOD", "FAILED", "MISSING", "LEAKING", "OUT OF MEMORY", "ALARM"), "bold red"
    ),
    **dict.fromkeys(
        ("CANNOT TELL", "NOT KNOWN", "WARNING", "unknown", "skipped", "cannot tell"), "yellow"
    ),
    **dict.fromkeys(("GO", "GOOD", "OK", "ok", "passed"), "green"),
}
"""The words that commands write in capitals, and the marks at the beginning of a line; the colour only repeats them."""

_WORDS: Final = re.compile(
    "|".join(
        rf"\b{word}\b".replace(" ", r"\s+") if word.isupper() else f"^{word}(?=  )"
        for word in STYLES
    )
)
_COLUMNS: Final = re.compile(r" *(?:\S+(?: \S+)* {2,}){0,2}")
"""A mark and a name, what follows which stands below it."""

_MOST_INDENT: Final = 30


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream writes to a terminal that knows more than lines."""
    return stream.isatty() and os.environ.get("TERM") not in {"dumb", "unknown"}


def console(stream: TextIO) -> Console:
    """Return what draws on a terminal and takes our words as they are; it keeps to NO_COLOR (no-color.org)."""
    from rich.console import Console  # noqa: PLC0415 - 60 modules, which only a terminal needs

    return Console(file=stream, markup=False, emoji=False, highlight=False)


def render_line(line: str, stream: TextIO, style: str = "") -> str:
    """Return a line as a stream shows it: on a terminal broken where it is too long, its words coloured."""
    if not is_terminal(stream):
        return line
    drawn = console(stream)
    with drawn.capture() as captured:
        drawn.print(wrap_line(line, drawn.width), style=style, soft_wrap=True, end="")
    return captured.get()


def wrap_line(line: str, columns: int) -> Text:
    """Return a line with its words coloured: what is too long goes on below its last column."""
    from rich.text import Text  # noqa: PLC0415 - see above

    if len(line) > columns:
        found = _COLUMNS.match(line)
        indent = min(len(found[0]) if found else 0, _MOST_INDENT, columns // 2) or 2
        # not rich's own, which has no indent and breaks what has no blank, as an address that is to be copied
        line = textwrap.fill(
            line,
            columns,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    text = Text(line)
    text.highlight_regex(_WORDS, lambda words: STYLES[" ".join(words.split())])
    return text


WIDTH: Final = 110
"""Where no terminal is narrower."""

HEAD: Final = 9
"""Columns of the words on the left: what was seen, what to do."""

NO_SIDECAR: Final = "check that vllm-headroom runs there, port 9839 unless it is set otherwise"


def wrap_text(head: str, body: str, *, indent: int | None = None) -> list[str]:
    """Return the lines of a text behind a head; those after the first are indented as far, or by `indent`."""
    return textwrap.wrap(
        body,
        min(WIDTH, console(sys.stdout).width) if is_terminal(sys.stdout) else WIDTH,
        initial_indent=head,
        subsequent_indent=" " * (len(head) if indent is None else indent),
        break_long_words=False,
        break_on_hyphens=False,
    )


def wrap_headed(head: str, body: str) -> list[str]:
    """Return the lines of a text behind a word; all words of an answer are in one column."""
    return wrap_text(f"   {head:<{HEAD - 3}}", body)


def join_paragraphs(parts: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of those parts that have any, with an empty line between them."""
    for number, lines in enumerate(lines for part in parts if (lines := list(part))):
        yield from ("", *lines) if number else lines


BLOCKS: Final = " ▁▂▃▄▅▆▇█"

Point = Sequence[Any]
"""Seconds and a value, None for a gap."""

Pick = Callable[[Iterable[float]], float]


def draw_bars(
    curve: Sequence[Point],
    width: int,
    rows: int,
    *,
    ends: tuple[float, float] | None = None,
    pick: Pick = min,
) -> list[str]:
    """Return a bar for each column: of its stretch of time what `pick` takes, else what was last; a gap is blank.

    `ends` are the values of the lowest and the highest bar; without them zero, and the highest there is.
    """
    curve = sorted(curve, key=lambda point: float(point[0]))
    columns: list[float | None] = []
    if curve:
        times = [float(seconds) for seconds, _ in curve]
        edges = [
            bisect_right(times, times[0] + (times[-1] - times[0]) * place / width)
            for place in range(width)
        ]
        stretches = (
            curve[min(first, last - 1) : last]
            for first, last in pairwise((0, *edges[1:], len(curve)))
        )
        known = (
            [float(value) for _, value in stretch if value is not None] for stretch in stretches
        )
        columns = [pick(values) if values else None for values in known]
    low, high = ends or (0.0, max((value for value in columns if value is not None), default=0.0))
    span = (high - low) or 1.0
    heights = [
        0 if value is None else max(1, round(8 * rows * (value - low) / span)) for value in columns
    ]  # 0 is a gap
    return [
        "".join(BLOCKS[min(8, max(0, height - 8 * row))] for height in heights).rstrip()
        for row in reversed(range(rows))
    ]
