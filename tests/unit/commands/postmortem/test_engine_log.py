"""A flight record with the engine's log beside it: what was likely becomes sure, or is contradicted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.command import read_data, run_command
from tests.engine_logs import DEATH, VLLM_0_19, begin
from tests.unit.commands.postmortem import scenes
from tests.unit.commands.postmortem.scenes import Engine, Scene
from tests.unit.commands.postmortem.test_postmortem import write
from vllm_headroom.units import MIB
from vllm_headroom_tools import engine_log

CUDA = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
HANG = "TimeoutError: RPC call to execute_model timed out.\n"
NO_CACHE = "ValueError: No available memory for the cache blocks. Try increasing\n"
LOAD = (
    "(APIServer pid=1) INFO {clock} [loggers.py:1] Engine 000: Avg prompt throughput: 9.0 tokens/s, Avg generation"
    " throughput: 100.0 tokens/s, Running: 6 reqs, Waiting: 0 reqs, GPU KV cache usage: 30.0%, Prefix cache hit"
    " rate: 0.0%\n"
)
SCENES: dict[str, tuple[Callable[[Random], Iterator[Engine]], str]] = {
    "leak": (scenes.leak, VLLM_0_19 + DEATH),
    "burst": (scenes.burst, VLLM_0_19 + DEATH),
    "one allocation": (scenes.failed_allocation, VLLM_0_19 + DEATH),
    "crash": (scenes.crash, VLLM_0_19 + CUDA),
    "hang": (scenes.hang, VLLM_0_19 + HANG),
    "start": (scenes.never_fitted, begin("0.19.0") + NO_CACHE),
}


REAL_LOGS = Path(__file__).parent / "logs"
REAL_ENDS: dict[str, tuple[Callable[[Random], Iterator[Engine]], str, str]] = {
    "prompt-logprobs": (scenes.failed_allocation, "out_of_memory_burst", "gpu_out_of_memory"),
    "neighbour": (scenes.neighbour, "out_of_memory_neighbour", "gpu_out_of_memory"),
    "weights": (scenes.never_fitted, "start_never_fitted", "gpu_out_of_memory"),
    "no-room-for-the-cache": (scenes.never_fitted, "start_never_fitted", "no_kv_cache_memory"),
    "taken-before": (scenes.never_fitted, "start_never_fitted", "little_free_memory"),
    "cuda-error": (scenes.crash, "crash", "cuda"),
    "context": (scenes.never_fitted, "start_never_fitted", "context_too_long"),
}
"""Lines of a real vLLM 0.32 that ended in these ways on the stand-in card (tests/card), by file: a record that fits,
the cause, and the failure of the log."""


def stamp(log: str, end_seconds: float, lead_seconds: float = 2.0) -> str:
    """Return a log as kubectl logs --timestamps has it, whose last line is shortly before the end."""
    moment = datetime.fromtimestamp(end_seconds - lead_seconds, UTC).isoformat().replace("+00:00", "Z")
    return "".join(f"{moment} {line}\n" for line in log.splitlines())


def dissect(folder: Path, scene: Scene, log: str | None) -> dict[str, Any]:
    incident = write(folder, scene)
    words = () if log is None else ("--log", "-")
    process = run_command("postmortem", str(incident), "--json", *words, stdin=log or "")
    assert (process.returncode, process.stderr) == (0, "")
    return read_data(process.stdout)


@pytest.mark.parametrize("name", SCENES)
def test_with_the_log_the_cause_is_sure(name: str, tmp_path: Path) -> None:
    make, log = SCENES[name]
    for seed in (1, 3, 5):  # the others have no header
        scene = scenes.scene(make, seed)
        assert scene.header is not None
        answer = dissect(tmp_path, scene, stamp(log, scene.header["t"]))

        expected = {str(scene.cause)}
        if name == "leak":  # where the record was too short for the detector, it looks like a burst
            expected |= {"out_of_memory_burst"}
        assert answer["cause"] in expected
        assert answer["sure"] == "sure"
        assert any("log" in evidence for evidence in answer["evidence"])


@pytest.mark.parametrize("name", REAL_ENDS)
def test_the_log_of_a_real_end_makes_the_cause_sure(name: str, tmp_path: Path) -> None:
    make, cause, failure = REAL_ENDS[name]
    scene = scenes.scene(make, 1)
    assert scene.header is not None
    log = (REAL_LOGS / f"{name}.log").read_text()
    answer = dissect(tmp_path, scene, stamp(log, scene.header["t"]))
    advice = read_data(run_command("advise", "-", "--json", stdin=log).stdout)

    assert (answer["cause"], answer["sure"]) == (cause, "sure")
    assert advice["log"]["failure"]["kind"] == failure
    assert advice["vllm_version"] == "0.32.0"


def test_every_real_log_is_tested() -> None:
    assert {path.stem for path in REAL_LOGS.iterdir()} == set(REAL_ENDS)


def test_what_the_samples_alone_fit_is_said_beside_it(tmp_path: Path) -> None:
    scene = scenes.scene(scenes.crash, 1)
    assert scene.header is not None
    alone = dissect(tmp_path, scene, None)
    answer = dissect(tmp_path, scene, stamp(VLLM_0_19 + DEATH, scene.header["t"]))

    assert (alone["cause"], answer["cause"]) == ("crash", "out_of_memory_burst")
    assert any("contradicts" in evidence for evidence in answer["evidence"])
    assert any(line["text"].startswith("GPU memory ran out while it served") for line in answer["log"])


@pytest.mark.parametrize("zone", [-8, 0, 9])
def test_the_engines_own_clock_has_an_unknown_zone(zone: int, tmp_path: Path) -> None:
    scene = scenes.scene(scenes.burst, 1)
    assert scene.header is not None
    moment = datetime.fromtimestamp(scene.header["t"], UTC) + timedelta(hours=zone)
    death = re.sub(r"04-22 02:00:0\d", moment.strftime("%m-%d %H:%M:%S"), DEATH)
    minute = timedelta(minutes=1)
    loads = "".join(LOAD.format(clock=(moment - n * minute).strftime("%m-%d %H:%M:%S")) for n in (3, 0))
    answer = dissect(tmp_path, scene, VLLM_0_19 + loads + death)

    assert answer["sure"] == "sure"
    assert answer["log"][0]["text"] == "6 running, 0 waiting, KV cache 30 % used"
    assert len([line for line in answer["log"] if "running" in line["text"]]) == 1


def test_a_log_of_another_time_changes_nothing_and_is_named(tmp_path: Path) -> None:
    scene = scenes.scene(scenes.burst, 1)
    assert scene.header is not None
    alone = dissect(tmp_path, scene, None)
    answer = dissect(tmp_path, scene, stamp(VLLM_0_19 + DEATH, scene.header["t"], lead_seconds=4000.0))

    assert (answer["cause"], answer["sure"]) == (alone["cause"], alone["sure"])
    assert "no line within two minutes" in answer["log"][0]["text"]


def test_the_last_minute_has_each_event_once_and_nothing_older(tmp_path: Path) -> None:
    scene = scenes.scene(scenes.burst, 1)
    assert scene.header is not None
    eager = "(EngineCore pid=243) WARNING 04-22 01:59:59 [vllm.py:1] Enforce eager set, disabling\n"
    stop = "INFO:     Shutting down\n"
    log = stamp(VLLM_0_19, scene.header["t"], 900) + stamp(eager + eager + DEATH + stop, scene.header["t"])
    texts = [line["text"] for line in dissect(tmp_path, scene, log)["log"]]

    assert texts[:2] == ["CUDA graphs are off", "the engine's core exited"]
    assert texts[2].startswith("GPU memory ran out while it served: 3.74 GiB were refused")
    assert texts[3:] == []


def test_the_log_that_the_daemon_read_is_in_the_incident(tmp_path: Path) -> None:
    scene = scenes.scene(scenes.crash, 1)
    assert scene.header is not None
    refusal = {"asked_bytes": 2**30, "gpu": 0, "free_bytes": 2**29}
    failure = {
        "kind": "gpu_out_of_memory",
        "line_number": 7,
        "time": {},
        "process": "EngineCore",
        "phase": "serving",
        "refusal": refusal,
    }
    scene.header["engine_log"] = {"failure": failure, "seconds": scene.header["t"]}
    answer = dissect(tmp_path, scene, None)

    assert (answer["cause"], answer["sure"]) == ("out_of_memory_burst", "sure")
    assert any("1 GiB were refused on GPU 0, 512 MiB were free" in evidence for evidence in answer["evidence"])
    scene.header["engine_log"] = {"failure": {"kind": "of another version"}, "seconds": "?"}
    assert dissect(tmp_path, scene, None)["cause"] == "crash"


def test_a_log_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.log"
    file.write_text("hello hf_secretsecret\n")
    process = run_command("postmortem", str(tmp_path), "--log", str(file))

    assert process.returncode == 2
    assert "is not a log of an engine" in process.stderr
    assert "hf_" not in process.stderr


ENDLESS = ("advise", "/dev/zero"), ("check", "--log", "/dev/zero", "/dev/zero"), ("plan", "--log", "/dev/zero")


@pytest.mark.parametrize("words", [*ENDLESS, ("postmortem", ".", "--log", "/dev/zero")], ids=lambda words: words[0])
def test_a_log_without_end_is_refused(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_log, "LOG_LIMIT_BYTES", 2 * MIB)
    process = run_command(*words)

    assert process.returncode == 2
    assert (process.stdout + process.stderr).count("/dev/zero: has more than 2 MiB: pass only the part") == 1


def test_a_log_of_the_largest_size_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (VLLM_0_19 + DEATH).encode().splitlines(keepends=True)
    monkeypatch.setattr(engine_log, "LOG_LIMIT_BYTES", sum(map(len, lines)))

    assert engine_log.parse_engine_log(iter(lines)).starts
