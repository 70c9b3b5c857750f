"""What most tests of preflight look at: one GPU that is free, on a machine of one's own making."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.nvml.library import FakeGpu, FakeNvml
from tests.fakes.nvml.reader import in_process
from tests.unit.commands.preflight.looking import Preflight


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    gpus = [FakeGpu(uuid="GPU-a", ecc=(True, True), rows=(False, False), pages_pending=False)]
    with in_process(tmp_path, monkeypatch, gpus) as fake:
        yield fake


@pytest.fixture
def preflight(nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Preflight:
    """Give all the time in the world for looking at processes, which on a busy machine takes long."""
    monkeypatch.setattr("vllm_headroom_tools.preflight.look.PROCESSES_SECONDS", 60.0)
    return Preflight(nvml, tmp_path)
