"""One Prometheus for all tests of what the dashboards show."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator

import pytest

from tests.dashboards.store import Prometheus, missing, running, store


@pytest.fixture(scope="session")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Give a Prometheus over hours of every scenario, which the first of the processes that run tests has stored."""
    if absent := missing():
        pytest.skip(f"not on the PATH: {absent} (Debian: prometheus)")
    folder = tmp_path_factory.mktemp("prometheus")
    shared = folder.parent.parent / "stored" if "PYTEST_XDIST_TESTRUNUID" in os.environ else folder.parent / "stored"
    shared.mkdir(exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "done").exists():
            store(shared)
            (shared / "done").touch()
    shutil.copytree(shared / "data", folder / "data")
    with running(folder) as there:
        yield there
