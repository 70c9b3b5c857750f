"""What one file of /sys or /proc says."""

from __future__ import annotations

import os

from vllm_headroom.scrape.proc.files import start_of


def text(path: str) -> str:
    """Return what a file says; raise OSError where it cannot be read."""
    return start_of(path).decode(errors="replace").strip()


def number(path: str) -> int | None:
    """Return the number in a file, None where it holds none; raise OSError where it cannot be read."""
    try:
        return int(start_of(path))
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
        return sorted(os.listdir(folder))  # noqa: PTH208 - no Path, as in start_of
    except OSError:
        return []
