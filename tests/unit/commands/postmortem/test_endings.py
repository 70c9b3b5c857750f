"""What only a header or a leftover tells of an end: a canary's wait, and a server that left its core behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.commands.postmortem import scenes
from tests.unit.commands.postmortem.test_postmortem import Run, run, write

__all__ = ["run"]


def test_a_stall_that_only_a_canary_saw_lasted_as_long_as_the_daemon_said(run: Run, tmp_path: Path) -> None:
    scene = scenes.scene(scenes.idle, 1)
    scene.samples[:] = [each for each in scene.samples if each["engines"]]
    scene.header = {"t": scene.samples[-1]["t"], "what": "stalled", "progress_age_seconds": 61.2}

    _, out, _ = run(write(tmp_path, scene))

    assert "A hang: the engine had work and nothing moved for 1 min 1 s. (likely)" in out


@pytest.mark.parametrize(("since", "said"), [(0.0, "A crash"), (-3600.0, "Ended while idle: it was stopped or killed")])
def test_a_server_that_leaves_a_core_behind_was_not_merely_idle(
    run: Run, tmp_path: Path, since: float, said: str
) -> None:
    scene = scenes.scene(scenes.idle, 1)
    assert scene.header is not None
    for sample in scene.samples:
        if sample["t"] >= scene.header["t"] + since:
            for gpu in sample["gpus"]:
                gpu["leftovers"] = [{"fate": "orphaned", "used": 5}]

    _, out, _ = run(write(tmp_path, scene))

    assert said in out.splitlines()[0]
