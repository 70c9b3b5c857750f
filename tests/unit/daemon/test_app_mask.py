"""Files of the daemon, whatever mask it inherits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vllm_headroom.daemon.app import forbid_writing_by_others


@pytest.mark.parametrize(("inherited", "mode"), [(0o000, 0o644), (0o022, 0o644), (0o077, 0o600), (0o027, 0o640)])
def test_no_file_can_be_written_by_others(inherited: int, mode: int, tmp_path: Path) -> None:
    own_mask = os.umask(inherited)
    try:
        forbid_writing_by_others()
        (tmp_path / "state").touch()
    finally:
        os.umask(own_mask)

    assert (tmp_path / "state").stat().st_mode & 0o777 == mode
