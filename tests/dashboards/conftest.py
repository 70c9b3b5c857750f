"""One Prometheus for all tests of what the dashboards show."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dashboards.store import Prometheus, missing, stored


@pytest.fixture(scope="session")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Give a Prometheus over hours of every scenario."""
    if absent := missing():
        pytest.skip(f"not on the PATH: {absent} (Debian: prometheus)")
    with stored(tmp_path_factory.mktemp("prometheus")) as there:
        yield there
