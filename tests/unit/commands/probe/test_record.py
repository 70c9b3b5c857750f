"""`probe record` over a vLLM of processes that leak on purpose: who did it, by file and line."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.command import OWN, read_data, run_command
from tests.process import eventually
from tests.unit.probe.running import INSIDE, Vllm, vllm
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.probe import record as asking
from vllm_headroom_tools.probe.install import install
from vllm_headroom_tools.probe.record import parse_answer, record
from vllm_headroom_tools.probe.report import render_recording

ENGINE: Final = INSIDE / "vllm" / "engine.py"
LINE: Final = 1 + ENGINE.read_text().splitlines().index("                leaked.append(bytearray(12_800))")


@pytest.fixture
def leaking(tmp_path: Path) -> Iterator[Vllm]:
    install(tmp_path / "site")
    (tmp_path / "files").mkdir()
    with vllm(tmp_path / "site", tmp_path / "files", FAKE_LEAK="1") as running:
        running.reports_of("EngineCore", "VllmWorker-0")
        eventually(lambda: len(running.reports()) == 3, "the API server reports too")
        yield running


def command(*words: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "vllm_headroom", "probe", *words],
        env=OWN | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_file_and_the_line_that_leak_are_named(leaking: Vllm) -> None:
    done = command("record", "--for", "2s", "--json", HEADROOM_PROBE_DIR=str(leaking.folder))
    out, stderr_text = done.communicate(timeout=120)

    assert (done.returncode, stderr_text) == (0, "3 processes record for 2 s\n")
    processes = read_data(out)["processes"]
    assert sorted(process["role"] for process in processes) == ["api_server", "engine_core", "worker"]
    assert [process["problem"] for process in processes] == [None] * 3
    (core,) = (process for process in processes if process["role"] == "engine_core")
    worst = core["host"][0]
    assert worst["stack"][0] == f"{ENGINE}:{LINE}"
    assert worst["bytes"] >= worst["count"] // 2 * 12_800 > 0, "each an object and its memory"
    assert core["cost"]["pause_seconds"] > 0
    assert core["cost"]["memory_bytes"] > 0
    assert not (leaking.folder / "record.json").exists()


def test_while_one_records_another_is_refused_and_with_nobody_waiting_it_ends(leaking: Vllm) -> None:
    here = str(leaking.folder.parent)  # for perf's file, which a command that is killed leaves
    first_process = command("record", "--for", "1h", HEADROOM_PROBE_DIR=str(leaking.folder), TMPDIR=here)
    eventually((leaking.folder / "record.json").exists, "it asks")
    second = command("record", "--for", "1s", HEADROOM_PROBE_DIR=str(leaking.folder))
    _, stderr_text = second.communicate(timeout=120)

    assert second.returncode == 2
    assert (
        stderr_text == f"vllm-headroom probe: {leaking.folder}/record.json is another recording's, which is running\n"
    )
    first_process.kill()
    first_process.communicate()
    long_ago = time.time() - 120
    os.utime(leaking.folder / "record.json", (long_ago, long_ago))
    recorded = asyncio.run(record(leaking.folder, 0.5, lambda _: None))
    assert [process["problem"] for process in recorded["processes"]] == [None] * 3


@pytest.mark.parametrize(("kinds", "host"), [(("host", "gpu"), True), (("host",), True), (("gpu",), False)])
def test_one_kind_of_memory_is_recorded_alone(leaking: Vllm, kinds: tuple[str, ...], host: bool) -> None:  # noqa: FBT001
    recorded = asyncio.run(record(leaking.folder, 2.0, lambda _: None, kinds))

    assert any(process["host"] for process in recorded["processes"]) == host


def test_a_process_that_dies_meanwhile_has_no_answer(leaking: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "RECORD_ANSWER_SECONDS", 3.0)

    def kill(_: str) -> None:
        leaking.process.kill()

    recorded = asyncio.run(record(leaking.folder, 0.5, kill))
    assert [process["problem"] for process in recorded["processes"] if process["role"] == "api_server"] == ["no answer"]
    assert any(line.endswith(": no answer") for line in render_recording(recorded))


def test_without_a_probe_there_is_nothing_to_record(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=f"no probe has written into {tmp_path}"):
        asyncio.run(record(tmp_path, 1, lambda _: None))
    with pytest.raises(BadInput, match="cannot be read"):
        asyncio.run(record(tmp_path / "nowhere", 1, lambda _: None))


def test_probes_that_wrote_long_ago_are_not_asked(leaking: Vllm) -> None:
    for report in leaking.reports():
        os.kill(report["pid"], signal.SIGKILL)
    eventually(lambda: all(_is_dead(report["pid"]) for report in leaking.reports()), "nobody writes any more")
    for path in leaking.folder.glob("*-*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"t": 1.0}))

    with pytest.raises(BadInput, match="vLLM is down, or its probes have stopped"):
        asyncio.run(record(leaking.folder, 1, lambda _: None))


def _is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # the second where it is reaped between opening and reading
        return True


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("record",), "needs one of: install FOLDER, record --for DURATION, snapshot [FILE]"),
        (("record", "--for", "2h"), "--for: got '2h', accepts a duration above 0, at most an hour, such as 90s or 10m"),
        (("record", "--for", "1m"), "HEADROOM_PROBE_DIR: needed to record, accepts the path of a directory"),
    ],
)
def test_what_cannot_be_recorded_is_reported(words: tuple[str, ...], why: str) -> None:
    done = run_command("probe", *words)

    assert (done.returncode, done.stderr) == (2, f"vllm-headroom probe: {why}\n")


GOOD: Final[dict[str, Any]] = {
    "headroom_record": 1,
    "id": "a",
    "host": [{"bytes": 5, "count": 1, "stack": ["x.py:1"]}],
    "cost": {"pause_seconds": 0.1},
}


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        (b"[1]", None),
        (b'{"headroom_record": 2}', None),
        (json.dumps(GOOD | {"id": "b"}).encode(), None),
        (b"{", "not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        (json.dumps(GOOD | {"host": [{"stack": ["a\x1b[1m"]}]}).encode(), "host[0].stack: got ['a\\x1b[1m'], accepts"),
        (json.dumps(GOOD | {"cost": 5}).encode(), "cost: got 5, accepts an object or null"),
        (json.dumps(GOOD | {"note": "\n"}).encode(), "note: got '\\n', accepts text without control characters"),
    ],
)
def test_an_answer_that_is_none_or_hostile_is_not_shown(content: bytes, answer: str | None) -> None:
    parsed_answer = parse_answer(content, "a")

    assert parsed_answer is None if answer is None else str(parsed_answer).startswith(answer)


def test_more_stacks_than_any_probe_gives_are_left_out() -> None:
    parsed_answer = parse_answer(json.dumps(GOOD | {"host": GOOD["host"] * 500}).encode(), "a")

    assert isinstance(parsed_answer, dict)
    assert len(parsed_answer["host"]) == 20
