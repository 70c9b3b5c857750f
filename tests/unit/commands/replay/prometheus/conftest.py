"""A fake Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.prometheus_server import PrometheusServer


@pytest.fixture
def server() -> Iterator[PrometheusServer]:
    with PrometheusServer() as server:
        yield server
