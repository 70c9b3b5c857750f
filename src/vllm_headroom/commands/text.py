"""Text for people, broken into lines."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import Final

from vllm_headroom.commands.terminal import console, draws

WIDTH: Final = 110
"""Where no terminal is narrower."""

HEAD: Final = 9
"""Columns of the words on the left: what was seen, what to do."""

NO_SIDECAR: Final = "check that vllm-headroom runs there, port 9839 unless it is set otherwise"


def wrapped(head: str, body: str, *, indent: int | None = None) -> list[str]:
    """Return the lines of a text behind a head; those after the first are indented as far, or by `indent`."""
    return textwrap.wrap(
        body,
        min(WIDTH, console(sys.stdout).width) if draws(sys.stdout) else WIDTH,
        initial_indent=head,
        subsequent_indent=" " * (len(head) if indent is None else indent),
        break_long_words=False,
        break_on_hyphens=False,
    )


def headed(head: str, body: str) -> list[str]:
    """Return the lines of a text behind a word, as all words of an answer stand in one column."""
    return wrapped(f"   {head:<{HEAD - 3}}", body)


def paragraphs(parts: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of those parts that have any, with an empty line between them."""
    for number, lines in enumerate(lines for part in parts if (lines := list(part))):
        yield from ("", *lines) if number else lines
