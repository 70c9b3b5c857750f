"""Every process collects the same tests: with other ids in two xdist workers, none would run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def test_another_process_collects_the_same_ids_later(request: pytest.FixtureRequest) -> None:
    """`make test` has collected all of them, more than a second before."""
    here = {item.nodeid for item in request.session.items}
    collect = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-m",
        "",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    environ = {**os.environ, "PYTHONHASHSEED": "31"}
    collected = subprocess.run(
        collect, cwd=request.config.rootpath, env=environ, capture_output=True, text=True, check=True
    )

    assert here <= set(collected.stdout.splitlines())
