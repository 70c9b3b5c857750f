"""One real vLLM for each module, since some of them kill it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.serving import FOLDER, Engine, serving, started
from tests.fakes.ports import free_port


@pytest.fixture(scope="module")
def starting() -> Iterator[Engine]:
    """A vLLM that was just started, and loads its model."""
    with serving(free_port(), FOLDER / "serve.log") as engine:
        yield engine


@pytest.fixture(scope="module")
def engine(starting: Engine) -> Engine:
    return started(starting)
