"""A /proc made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.proc_tree import ProcTree


@pytest.fixture
def tree(tmp_path: Path) -> ProcTree:
    return ProcTree(tmp_path)
