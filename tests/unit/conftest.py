"""What tests of several rooms look at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.nvml.library import GIB, FakeGpu, FakeNvml
from tests.fakes.nvml.reader import in_process


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    """Two GPUs with a driver that is right everywhere."""
    gpus = [FakeGpu(uuid=f"GPU-{letter}", used_bytes=GIB) for letter in "ab"]
    with in_process(tmp_path, monkeypatch, gpus) as fake:
        yield fake
