"""The leaks in C, built as a program or as a library."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("leaks.c")


def build_leaks(folder: Path, *options: str) -> Path:
    """Return the program, with other options the library; without a compiler the test is skipped."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    built = folder / "libleaks.so"
    subprocess.run(["cc", "-O0", *options, "-o", str(built), str(SOURCE)], check=True)
    return built
