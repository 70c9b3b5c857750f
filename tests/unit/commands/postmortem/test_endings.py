"""What only a header or a leftover shows of an end: a canary's wait, and a server that left its core behind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

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
    last_seconds = max(sample["t"] for sample in scene.samples if sample["engines"])
    gone_sample = next(sample for sample in scene.samples if sample["t"] > last_seconds and not sample["engines"])
    scene.samples[:] = [
        *(sample for sample in scene.samples if sample["t"] <= last_seconds),
        {**gone_sample, "t": last_seconds + seconds},
    ]
    scene.header = {"t": last_seconds + seconds, "what": "ended", "reason": "gone"}

    _, out, _ = run(write(tmp_path, scene))

    assert f"look the same from outside. ({sureness})" in " ".join(out.split())


def test_a_crash_that_no_sample_preceded_names_the_gap(run: Run, tmp_path: Path) -> None:
    scene = scenes.scene(scenes.crash, 1)
    last_seconds = max(sample["t"] for sample in scene.samples if sample["engines"])
    gone_sample = next(sample for sample in scene.samples if sample["t"] > last_seconds and not sample["engines"])
    scene.samples[:] = [
        *(sample for sample in scene.samples if sample["t"] <= last_seconds),
        {**gone_sample, "t": last_seconds + 40.0},
    ]
    scene.header = {"t": last_seconds + 40.0, "what": "ended", "reason": "gone"}

    _, out, _ = run(write(tmp_path, scene))

    text = " ".join(out.split())
    assert "whether GPU memory ran out is not known. (possible)" in text
    assert "no sample in the 40 s before the exit: what was free at the exit is not known" in text


@pytest.mark.parametrize(
    ("since", "headline"),
    [(0.0, "the engine crashed with"), (-3600.0, "Exited while idle: a stop, a kill and a crash look the same")],
)
def test_a_server_that_leaves_a_core_behind_was_not_merely_idle(
    run: Run, tmp_path: Path, since: float, headline: str
) -> None:
    scene = scenes.scene(scenes.idle, 1)
    assert scene.header is not None
    for sample in scene.samples:
        if sample["t"] >= scene.header["t"] + since:
            for gpu in sample["gpus"]:
                gpu["leftovers"] = [{"fate": "orphaned", "used": 5}]

    _, out, _ = run(write(tmp_path, scene))

    assert headline in out.splitlines()[0]


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
    ("age", "headline"),
    [(2.0, "A failed start with 78 GiB of GPU memory free."), (4000.0, "A crash with 78 GiB of GPU memory free.")],
)
def test_what_was_seen_from_its_birth_and_never_answered_had_not_served(
    run: Run, tmp_path: Path, age: float, headline: str
) -> None:
    scene = scenes.Scene(cause=EndCause.CRASH)
    gpu = {"gpu": 0, "uuid": "GPU-a", "total": 80 * GIB, "used": 2 * GIB, "reserved": 0, "engine": 2 * GIB, "other": 0}
    server = {"role": "api_server", "rss": GIB, "started_at": scenes.BEGAN - age}
    for turn in range(6):
        alive = [server] if turn < 4 else []
        scene.samples.append({"t": scenes.BEGAN + 5 * turn, "gpus": [gpu], "engines": None, "processes": alive})
    scene.header = {"t": scenes.BEGAN + 20, "what": "ended", "reason": "gone"}

    _, out, _ = run(write(tmp_path, scene))

    assert headline in out.splitlines()[0]
    assert ("its page had not answered yet" in out) == (age == 2.0)


FREE_MIB = 3768
"""3.68 GiB, with which 3.74 were refused (vllm-project/vllm#49182)."""


def crash_with_little_free() -> scenes.Scene:
    """Return a crash at work of an engine whose memory is flat."""
    scene = scenes.Scene(cause=EndCause.BURST, header={"t": scenes.BEGAN + 980, "what": "ended"})
    for turn in range(200):
        alive = turn < 196
        held_bytes = 80 * GIB - FREE_MIB * scenes.MIB if alive else 0
        gpu = {
            "gpu": 0,
            "uuid": "GPU-a",
            "total": 80 * GIB,
            "used": held_bytes,
            "reserved": 0,
            "engine": held_bytes,
            "other": 0,
        }
        page = {"model_name": "m", "engine": "0", "running": 6, "waiting": 0, "finished_total": turn, "awake": True}
        page |= {"started_at": scenes.BEGAN - 600, "generation_tokens_total": 600 * turn}
        roles = ("api_server", "engine_core", "worker") if alive else ()
        processes = [{"role": role, "rss": GIB, "started_at": scenes.BEGAN - 600} for role in roles]
        engines = [page] if alive else None
        scene.samples.append({"t": scenes.BEGAN + 5 * turn, "gpus": [gpu], "engines": engines, "processes": processes})
    return scene


def test_one_allocation_may_have_failed_with_gigabytes_free(run: Run, tmp_path: Path) -> None:
    _, out, _ = run(write(tmp_path, crash_with_little_free()))

    text = " ".join(out.split())
    assert "Out of GPU memory in a burst, perhaps: 3.68 GiB were left on GPU 0, and one allocation may have" in text
    assert "(possible)" in text
    assert "look in vLLM's log for OutOfMemoryError with a size above 3.68 GiB" in text
    assert "or A crash with 3.68 GiB free; whether an allocation needed more is not known. (possible)" in text
    assert "Not GPU memory" not in text


PROBED = {"before": {"probe": [{"pid": 12, "role": "worker", "devices": [{"uuid": "GPU-a", "allocated_bytes": 1}]}]}}


@pytest.mark.parametrize(
    ("witness", "sentence"),
    [
        pytest.param(PROBED, "Not GPU memory: the engine crashed with 3.68 GiB free. (likely)", id="probe"),
        pytest.param(
            {"xids": [{"t": scenes.BEGAN + 975, "uuid": "GPU-a", "xid": 79}]},
            "Not GPU memory: the engine crashed with 3.68 GiB free. (sure)",
            id="XID",
        ),
        pytest.param(
            {**PROBED, "ooms": [{"uuid": "GPU-a", "asked": 3830 * scenes.MIB, "free": FREE_MIB * scenes.MIB}]},
            "Out of GPU memory in a burst: an allocation of torch failed. (likely)",
            id="OutOfMemoryError",
        ),
    ],
)
def test_only_a_witness_excludes_or_proves_a_failed_allocation(
    run: Run, tmp_path: Path, witness: dict[str, Any], sentence: str
) -> None:
    scene = crash_with_little_free()
    scene.header = {"t": scenes.BEGAN + 980, "what": "ended", "reason": "gone", **witness}

    _, out, _ = run(write(tmp_path, scene))

    assert sentence in " ".join(out.split())


def test_an_exit_over_its_budget_has_the_option_as_the_first_step(run: Run, tmp_path: Path) -> None:
    scene = crash_with_little_free()
    for sample in scene.samples:
        for gpu in sample["gpus"]:
            gpu["used"] = gpu["engine"] = int(0.94 * 80 * GIB * 1.049) if sample["engines"] else 0
        for engine in sample["engines"] or ():
            engine["gpu_memory_utilization"] = 0.94

    _, out, _ = run(write(tmp_path, scene))

    text = " ".join(out.split())
    assert "Over its budget from the start: the engine held 3.68 GiB (4.9 %) more than it on GPU 0" in text
    assert re.search(r"counted as +over_budget", out)
    assert "start it with --gpu-memory-utilization 0.89 in place of 0.94" in text
    assert text.endswith("Situation over budget")


def test_the_operators_figure_is_a_budget_in_the_sidecar_and_as_an_option(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    incident = write(tmp_path, crash_with_little_free())
    sentence = "Over its budget from the start, perhaps: the engine held 3.32 GiB (4.5 %) more than it on GPU 0"

    _, with_option, _ = run(incident, "--reported-bytes", "73GiB")
    monkeypatch.setenv("HEADROOM_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("HEADROOM_REPORTED_BYTES", "73GiB")
    _, in_sidecar, _ = run()
    monkeypatch.setenv("HEADROOM_REPORTED_BYTES", "much")
    refused = run()

    assert sentence in " ".join(with_option.split())
    assert sentence in " ".join(in_sidecar.split())
    assert refused[0] == 2
    assert refused[2].count("\n") == 1
    assert "HEADROOM_REPORTED_BYTES takes a size such as 72GiB" in refused[2]


POD = {"namespace": "llm", "pod": "vllm-0", "container": "server"}


@pytest.mark.parametrize(
    ("pod", "log_command"),
    [
        (POD, "kubectl logs --previous -n llm vllm-0 -c server"),
        ({**POD, "pod": "vllm-0; reboot"}, "kubectl logs --previous:"),
        ({"namespace": "llm", "pod": "vllm-0"}, "kubectl logs --previous:"),
        (None, "kubectl logs --previous:"),
    ],
)
def test_the_log_to_read_is_that_of_the_incidents_pod(
    run: Run, tmp_path: Path, pod: dict[str, str] | None, log_command: str
) -> None:
    scene = scenes.scene(scenes.crash, 1)
    scene.header = {**(scene.header or {}), "engine_pod": pod}

    _, out, _ = run(write(tmp_path, scene))

    assert f"Read vLLM's log up to the end: {log_command}" in " ".join(out.split())
