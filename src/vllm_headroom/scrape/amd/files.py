"""What one file of /sys or /proc says."""

from __future__ import annotations

import os
from typing import Final

_MOST_BYTES: Final = 4096
"""A file of /sys is one page at most."""


def text(path: str) -> str:
    """Return what a file says; raise OSError where it cannot be read."""
    return _read(path).decode(errors="replace").strip()


def number(path: str) -> int | None:
    """Return the number in a file, None where it holds none; raise OSError where it cannot be read."""
    try:
        return int(_read(path))
    except ValueError:
        return None


def told(path: str) -> int | None:
    """Return the number in a file, None where the driver does not tell it now or at all."""
    try:
        return number(path)
    except OSError:
        return None


def line(path: str) -> str:
    """Return what a file says, nothing where it cannot be read."""
    try:
        return text(path)
    except OSError:
        return ""


def names(folder: str) -> list[str]:
    """Return the names in a folder in order, none where it cannot be looked into."""
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - as above
    except OSError:
        return []


def _read(path: str) -> bytes:
    """Read without Path and without a buffer: a look reads a hundred files where there are eight cards."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _MOST_BYTES)
    finally:
        os.close(descriptor)
