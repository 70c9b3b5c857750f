"""What a command reads from and writes to its terminal: words, options, text."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import Final, NoReturn, TypeVar

T = TypeVar("T")

BAD_INPUT: Final = 2


class Parser(argparse.ArgumentParser):
    """A command's options; what is wrong with them is one line, and ends the process with status 2."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line."""
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see --help\n")


def accepting(read: Callable[[str], T], accepts: str) -> Callable[[str], T]:
    """Return `read`, which raises ValueError, as the type of an option; its refusal says what is accepted."""

    def checked(text: str) -> T:
        try:
            return read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"got {text!r}, accepts {accepts}") from None

    return checked


def say(text: str) -> None:
    """Write to standard output; whoever stops reading it needs no more of it."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
