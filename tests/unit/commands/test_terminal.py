"""What a terminal adds: colours, and lines that keep to its width."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.commands.replay.traces import leaking, text
from vllm_headroom.commands.terminal import Terminal, terminal

NARROW = Terminal(columns=40, coloured=False)
BRIGHT = Terminal(columns=200, coloured=True)
PLAIN = {name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "TERM", "COLUMNS"}}


@pytest.mark.parametrize("word", ["NO GO", "NOT GOOD", "FAILED", "MISSING", "LEAKING", "OUT OF MEMORY"])
def test_what_is_bad_is_red(word: str) -> None:
    assert BRIGHT.lines(f"GPU 0: {word}; and more") == [f"GPU 0: \x1b[1;31m{word}\x1b[0m; and more"]


def test_what_is_good_is_green_and_what_is_not_known_yellow() -> None:
    assert BRIGHT.lines("GO after 3 s") == ["\x1b[32mGO\x1b[0m after 3 s"]
    assert BRIGHT.lines("CANNOT TELL") == ["\x1b[33mCANNOT TELL\x1b[0m"]


@pytest.mark.parametrize("line", ["the state missing", "HEADROOM_MISSING=1", "going", "DRIVER_FAILED"])
def test_words_that_are_no_verdict_keep_their_colour(line: str) -> None:
    assert BRIGHT.lines(line) == [line]


def test_a_long_line_goes_on_below_its_last_column() -> None:
    lines = NARROW.lines("ok       health       healthy after three seconds of waiting for it")

    assert lines == [
        "ok       health       healthy after",
        "                    three seconds of",
        "                    waiting for it",
    ]


def test_what_has_no_blank_is_left_to_be_copied() -> None:
    assert NARROW.lines(f"see {'x' * 90} there") == ["see", f"  {'x' * 90}", "  there"]


def test_no_line_is_wider_than_the_terminal() -> None:
    line = "GPU 0 (GPU-11111111-2222-3333) NVIDIA H100: 1.2 GiB free of 79 GiB, vLLM asks for 71"

    assert all(len(part) <= 40 for part in NARROW.lines(line))
    assert " ".join(" ".join(NARROW.lines(line)).split()) == line


def test_a_file_gets_each_line_whole_and_plain() -> None:
    assert terminal(io.StringIO()).lines("FAILED " * 90) == ["FAILED " * 90]


def on_a_terminal(*words: str, **environment: str) -> tuple[str, int]:
    """Return what a command draws on a terminal of 80 columns, and its status."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "vllm_headroom", *words]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=PLAIN | {"TERM": "xterm"} | environment)
    os.close(theirs)
    shown = bytearray()
    try:
        while part := os.read(ours, 65536):
            shown.extend(part)
    except OSError:  # what Linux says of a terminal whose other side has closed
        os.close(ours)
    return shown.decode(), process.wait(30)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    file = tmp_path / "trace.jsonl"
    file.write_text(text(leaking(3.0)))
    return str(file)


def test_a_command_is_coloured_and_fits_on_a_terminal(trace: str) -> None:
    shown, status = on_a_terminal("replay", "--fail-on-leak", trace, COLUMNS="60")

    assert status == 1
    assert "\x1b[1;31mLEAKING\x1b[0m" in shown
    answer = re.sub(r"\r[^\r\n]*\x1b\[K", "", shown)  # without the bar that a busy machine has time to draw
    assert max(map(len, re.sub(r"\x1b\[[\d;]*m", "", answer).splitlines())) <= 60


@pytest.mark.parametrize("off", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_who_wants_no_colour_gets_none(trace: str, off: dict[str, str]) -> None:
    shown, _ = on_a_terminal("replay", trace, **off)

    assert "LEAKING" in shown
    assert not re.search(r"\x1b\[[\d;]*m", shown)


def test_a_mistake_is_told_within_the_width_too() -> None:
    shown, status = on_a_terminal("plan", COLUMNS="60")

    assert status == 2
    assert "missing:" in shown
    assert max(map(len, shown.replace("\r\x1b[K", "").splitlines())) <= 60
