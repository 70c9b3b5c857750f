"""What most tests of the smoke test reach: a vLLM that is well, and a GPU on which it has what it asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.nvml.library import GIB, FakeGpu, FakeNvml
from tests.fakes.nvml.reader import in_process
from tests.unit.commands.smoke.serving import Vllm


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    with in_process(tmp_path, monkeypatch, [FakeGpu(uuid="GPU-a", used_bytes=74 * GIB)]) as fake:
        yield fake


@pytest.fixture
def vllm() -> Iterator[Vllm]:
    with Vllm() as server:
        yield server
