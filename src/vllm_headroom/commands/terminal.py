"""What a terminal adds to text: a width that lines keep to, and colours for the words that say how it stands."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from dataclasses import dataclass
from typing import Final, TextIO

RED, GREEN, YELLOW, BLUE, CYAN, DIM, BOLD, ALARM = "31", "32", "33", "34", "36", "2", "1", "1;31"

STYLES: Final = {
    **dict.fromkeys(("NO GO", "NOT GOOD", "FAILED", "MISSING", "LEAKING", "OUT OF MEMORY", "ALARM"), ALARM),
    **dict.fromkeys(("CANNOT TELL", "NOT KNOWN", "WARNING"), YELLOW),
    **dict.fromkeys(("GO", "GOOD", "OK"), GREEN),
}
"""The words that commands write in capitals; the colour only repeats them."""

_WORDS: Final = re.compile(rf"\b(?:{'|'.join(STYLES)})\b")
_COLUMNS: Final = re.compile(r" *(?:\S+(?: \S+)* {2,}){0,2}")
"""A mark and a name, what follows which stands below it."""

_MOST_INDENT: Final = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """Where text goes; `columns` is None where it is no terminal."""

    columns: int | None
    coloured: bool

    def lines(self, line: str) -> list[str]:
        """Return a line as it is shown: broken where it is too long, its words coloured."""
        return [_WORDS.sub(lambda found: self.painted(found[0], STYLES[found[0]]), part) for part in self._broken(line)]

    def painted(self, text: str, style: str) -> str:
        """Return a text in a colour, where there are any."""
        return f"\x1b[{style}m{text}\x1b[0m" if self.coloured else text

    def _broken(self, line: str) -> list[str]:
        if self.columns is None or len(line) <= self.columns:
            return [line]
        found = _COLUMNS.match(line)
        indent = min(len(found[0]) if found else 0, _MOST_INDENT, self.columns // 2) or 2
        return textwrap.wrap(
            line, self.columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
        )


def terminal(stream: TextIO) -> Terminal:
    """Return what is known of the terminal that a stream writes to; NO_COLOR (no-color.org) is kept to."""
    if not stream.isatty():
        return Terminal(columns=None, coloured=False)
    coloured = draws(stream) and not os.environ.get("NO_COLOR")
    return Terminal(columns=shutil.get_terminal_size().columns, coloured=coloured)


def draws(stream: TextIO) -> bool:
    """Return whether a stream writes to a terminal that knows more than lines."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"
