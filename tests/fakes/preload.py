"""A library in C that stands before the C library's own calls in one process, by LD_PRELOAD."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def preloadable(source: Path, folder: Path) -> Path:
    """Return the library that this source becomes, in `folder`; the test is skipped where no compiler is."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip(f"no C compiler named cc, which {source.name} needs")
    library = folder / f"{source.stem}.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return library
