"""Standard streams that are closed, full or taken away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.recorded import FOLDER
from tests.fakes.engine_server import EngineServer, page
from tests.process import eventually

RECORDED = (FOLDER / "vllm-0.32.0" / "load-waiting.prom").read_text()
PROGRAM = (sys.executable, "-m", "vllm_headroom")


def without(streams: str, *words: str) -> list[str]:
    """Return how to run the program with a shell's redirections."""
    return ["sh", "-c", f'exec "$@" {streams}', "sh", *PROGRAM, *words]


def test_the_daemon_does_not_take_the_place_of_closed_streams_for_its_own_files(tmp_path: Path) -> None:
    """Else what is written to the number 2 could go to whatever was opened first."""
    with EngineServer(page(RECORDED)) as engine:
        settings = {"HEADROOM_ENGINE_URL": engine.url, "HEADROOM_LISTEN_PORT": "0", "HEADROOM_STATE_DIR": str(tmp_path)}
        with subprocess.Popen(without("<&- >&- 2>&-"), env={**os.environ, **settings}) as process:
            try:
                eventually(lambda: engine.requests, "the engine is read")
                streams = [Path(f"/proc/{process.pid}/fd/{number}").readlink() for number in range(3)]
                process.send_signal(signal.SIGTERM)

                assert process.wait(30) == 0
                assert streams == [Path(os.devnull)] * 3
            finally:
                process.kill()

    assert not any("level=" in file.read_text() for file in tmp_path.iterdir() if file.is_file())


@pytest.mark.parametrize("words", [("--version",), ("plan", "--help")])
@pytest.mark.parametrize(
    ("streams", "status", "message"),
    [
        (">&-", 0, ""),
        ("<&- >&- 2>&-", 0, ""),
        (">/dev/full", 2, "vllm-headroom: the answer cannot be written: No space left on device\n"),
        (">/dev/full 2>&1", 2, ""),
    ],
)
def test_an_answer_that_nobody_can_take_is_no_verdict(
    words: tuple[str, ...], streams: str, status: int, message: str
) -> None:
    """A traceback would end with 1, which to a script means that a limit was exceeded."""
    done = subprocess.run(without(streams, *words), capture_output=True, text=True, check=False, timeout=60)

    assert (done.returncode, done.stderr) == (status, message)


@pytest.mark.parametrize("words", [("nope",), ("check", "--nope"), ("replay", "no-such-file"), ("run", "--nope")])
def test_a_complaint_that_nobody_can_take_changes_no_status(words: tuple[str, ...]) -> None:
    assert subprocess.run(without("2>/dev/full", *words), check=False, timeout=60).returncode == 2


def test_a_note_that_nobody_can_take_ends_no_replay(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text('{"headroom_trace": 1}\n{"t": 1760000000.0}\n{"t": 17600')
    done = subprocess.run(without("2>/dev/full", "replay", str(trace)), capture_output=True, check=False, timeout=60)

    assert done.returncode == 0
    assert done.stdout.startswith(b"1 samples over 0 s")


def test_without_standard_input_there_is_no_trace_in_it() -> None:
    done = subprocess.run(without("<&-", "replay", "-"), capture_output=True, text=True, check=False, timeout=60)

    assert done.returncode == 2
    assert done.stderr.startswith("vllm-headroom replay: line 1: no trace of this version")
