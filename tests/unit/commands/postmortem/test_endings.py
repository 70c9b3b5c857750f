"""What only a header or a leftover shows of an end: a canary's wait, and a server that left its core behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.commands.postmortem import scenes
from tests.unit.commands.postmortem.scenes import GIB
from tests.unit.commands.postmortem.test_postmortem import Run, run, write
from vllm_headroom.vocabulary import EndCause

__all__ = ["run"]


def test_a_stall_that_only_a_canary_saw_lasted_as_long_as_the_daemon_said(run: Run, tmp_path: Path) -> None:
    scene = scenes.scene(scenes.idle, 1)
    scene.samples[:] = [sample for sample in scene.samples if sample["engines"]]
    scene.header = {"t": scene.samples[-1]["t"], "what": "stalled", "progress_age_seconds": 61.2}

    _, out, _ = run(write(tmp_path, scene))

    assert "A hang: the engine had work and made no progress for 1 min 1 s. (likely)" in out


@pytest.mark.parametrize(("seconds", "sureness"), [(15.0, "likely"), (15.1, "possible")])
def test_an_idle_end_is_less_sure_where_nobody_looked_for_longer_than_15_seconds(
    run: Run, tmp_path: Path, seconds: float, sureness: str
) -> None:
    scene = scenes.scene(scenes.idle, 1)
    last = max(sample["t"] for sample in scene.samples if sample["engines"])
    gone = next(each for each in scene.samples if each["t"] > last and not each["engines"])
    scene.samples[:] = [*(each for each in scene.samples if each["t"] <= last), {**gone, "t": last + seconds}]
    scene.header = {"t": last + seconds, "what": "ended", "reason": "gone"}

    _, out, _ = run(write(tmp_path, scene))

    assert f"look the same from outside. ({sureness})" in " ".join(out.split())


@pytest.mark.parametrize(
    ("since", "said"),
    [(0.0, "the engine crashed with"), (-3600.0, "Exited while idle: a stop, a kill and a crash look the same")],
)
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


def test_a_server_that_ends_a_look_after_its_core_was_not_merely_idle(run: Run, tmp_path: Path) -> None:
    scene = scenes.scene(scenes.idle, 1)
    assert scene.header is not None
    for sample in scene.samples:
        if sample["t"] > scene.header["t"] - 6:
            sample["engines"] = None
            sample["gpus"][0]["leftovers"] = [{"fate": "orphaned", "used": 5}]

    _, out, _ = run(write(tmp_path, scene))

    assert "the engine crashed with" in out.splitlines()[0]
    assert "api server exited before the others" in out


@pytest.mark.parametrize(
    ("age", "said"),
    [(2.0, "A failed start with 78 GiB of GPU memory free."), (4000.0, "A crash with 78 GiB of GPU memory free.")],
)
def test_what_was_seen_from_its_birth_and_never_answered_had_not_served(
    run: Run, tmp_path: Path, age: float, said: str
) -> None:
    scene = scenes.Scene(cause=EndCause.CRASH)
    gpu = {"gpu": 0, "uuid": "GPU-a", "total": 80 * GIB, "used": 2 * GIB, "reserved": 0, "engine": 2 * GIB, "other": 0}
    server = {"role": "api_server", "rss": GIB, "started_at": scenes.BEGAN - age}
    for turn in range(6):
        alive = [server] if turn < 4 else []
        scene.samples.append({"t": scenes.BEGAN + 5 * turn, "gpus": [gpu], "engines": None, "processes": alive})
    scene.header = {"t": scenes.BEGAN + 20, "what": "ended", "reason": "gone"}

    _, out, _ = run(write(tmp_path, scene))

    assert said in out.splitlines()[0]
    assert ("its page had not answered yet" in out) == (age == 2.0)
