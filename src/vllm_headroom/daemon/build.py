"""Which build of the daemon this is."""

from __future__ import annotations

import platform
from functools import cache
from importlib import metadata
from pathlib import Path


@cache  # looked up in the distribution's files, and told on every page
def version() -> str:
    """Return the version of the installed distribution."""
    return metadata.version("vllm-headroom")


def build() -> tuple[str, str, str]:
    """Return version, source revision (empty where the build wrote none) and the version of Python."""
    stamp = Path(__file__).parents[1] / "REVISION"
    revision = stamp.read_text().strip() if stamp.is_file() else ""
    return version(), revision, platform.python_version()
