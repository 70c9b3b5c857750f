"""Files of the daemon, whatever mask it inherits."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from vllm_headroom.config import Settings
from vllm_headroom.daemon import app, logs, node_daemon
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


@pytest.mark.parametrize("serve", [app.serve, node_daemon.serve], ids=["one engine", "several engines"])
def test_either_daemon_sets_the_mask_before_it_runs(
    serve: Callable[[Settings], NoReturn], monkeypatch: pytest.MonkeyPatch
) -> None:
    masks: list[int] = []

    def note_mask(**_: object) -> NoReturn:
        masks.append(os.umask(0))
        raise KeyboardInterrupt

    monkeypatch.setattr(asyncio, "Runner", note_mask)
    monkeypatch.setattr(logs, "configure", lambda *_: None)
    own_mask = os.umask(0)
    try:
        with pytest.raises(KeyboardInterrupt):
            serve(Settings())
    finally:
        os.umask(own_mask)

    assert masks == [app.OTHERS_WRITE_BITS]
