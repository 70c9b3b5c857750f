"""The probe, installed, and a folder for its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_headroom_tools.probe.install import install


@pytest.fixture
def site(tmp_path: Path) -> Path:
    install(tmp_path / "site")
    return tmp_path / "site"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    return tmp_path / "files"
