"""What the measurements share: the table and eight GPUs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.results import Results
from tests.fakes.nvml.library import GIB, FakeGpu, FakeNvml

GPUS = 8


@pytest.fixture(scope="session")
def results() -> Iterator[Results]:
    """Collect rows; print the table when the last measurement is over."""
    collected = Results()
    yield collected
    sys.stdout.write(f"\n\n{collected.table()}\n\n")


@pytest.fixture
def nvml(tmp_path: Path) -> FakeNvml:
    """Eight busy GPUs in the C library, with one process each."""
    return quiet_nvml(tmp_path, GPUS)


def quiet_nvml(folder: Path, gpus: int) -> FakeNvml:
    """Return the C library with busy GPUs, with one process each."""
    fake_gpus = [
        FakeGpu(
            uuid=f"GPU-{index}",
            used_bytes=70 * GIB,
            utilization_percent=90,
            temperature_celsius=60,
            power_milliwatts=300_000,
            processes={os.getpid(): 69 * GIB},
        )
        for index in range(gpus)
    ]
    return QuietNvml(folder, fake_gpus)


class QuietNvml(FakeNvml):
    """The C library without its record of calls, whose cost would be measured too."""

    def write(self) -> None:
        super().write()
        lines = self._file.read_text().splitlines(keepends=True)
        unfinished = self._file.with_suffix(".unfinished")
        unfinished.write_text("".join(line for line in lines if not line.startswith("calls ")))
        unfinished.replace(self._file)
