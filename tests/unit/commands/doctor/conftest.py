"""What most tests of the doctor look at: a vLLM, two GPUs, and a /proc of one's own making."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.nvml.library import GIB, FakeGpu, FakeNvml
from tests.fakes.nvml.reader import in_process
from tests.unit.commands.doctor.looking import Vllm


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    """Two GPUs with a driver that is right everywhere."""
    gpus = [FakeGpu(uuid=f"GPU-{letter}", used_bytes=GIB) for letter in "ab"]
    with in_process(tmp_path, monkeypatch, gpus) as fake:
        yield fake


@pytest.fixture
def vllm() -> Iterator[Vllm]:
    with Vllm() as server:
        yield server
