"""Traces that several tests read, written once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.commands.check.engine_traces import engine, write_trace


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="session")
def steady(folder: Path) -> str:
    """Nothing grows."""
    return write_trace(folder / "steady.jsonl", engine())


@pytest.fixture(scope="session")
def leaking(folder: Path) -> str:
    """12.8 MB per thousand requests of GPU memory, and 51.2 MB of host memory."""
    return write_trace(folder / "leaking.jsonl", engine(leak=12.8e6, host_leak=51.2e6))


@pytest.fixture(scope="session")
def short(folder: Path) -> str:
    """Five minutes."""
    return write_trace(folder / "short.jsonl", engine(1 / 12))
