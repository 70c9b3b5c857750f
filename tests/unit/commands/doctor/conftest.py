"""What most tests of the doctor look at, beside two GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.commands.doctor.looking import Vllm


@pytest.fixture
def vllm() -> Iterator[Vllm]:
    with Vllm() as server:
        yield server
