"""A user to whom permissions apply, also where the tests run as root."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

NOBODY: Final = 65534


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    """Be nobody, where this is root."""
    previous_user = os.geteuid()
    if previous_user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(previous_user)


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """Make a folder that nobody can look into; those of pytest are closed to others."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
