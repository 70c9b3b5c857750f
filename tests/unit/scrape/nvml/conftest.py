"""A fake NVML library with three GPUs; a file of tests that needs other GPUs has its own `fake`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.nvml.library import FakeGpu, FakeNvml
from tests.fakes.nvml.reader import in_process


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    with in_process(tmp_path, monkeypatch, [FakeGpu(uuid=f"GPU-{index}") for index in range(3)]) as fake:
        yield fake
