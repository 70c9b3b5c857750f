"""How far something long has come, on a terminal alone."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.unit.commands.replay.traces import leaking, text
from tests.unit.commands.screen import on_a_terminal, plain

READ: Final = """
import sys, time
from vllm_headroom_tools import progress
from vllm_headroom_tools.early import exit_on_signals

def lines():
    yield from (b"12345", b"67890")
    while "hang" in sys.argv:
        time.sleep(0.05)  # not forever: a signal just before it would only be answered after it

exit_on_signals(None)
progress.REDRAW_SECONDS = 0.0
whole, patience = (None if "pipe" in sys.argv else 10), (60.0 if "soon" in sys.argv else 0.0)
for line in progress.track(lines(), "Reading [red]:smile:", whole, len, patience_seconds=patience):
    print(end=f"{line}" if "each" in sys.argv else "")
print("done")
"""

REPLAY: Final = """
import sys
from vllm_headroom_tools import progress
progress.track.__kwdefaults__["patience_seconds"] = 0.0
sys.argv = ["vllm-headroom", "replay", sys.argv[1]]
from vllm_headroom.__main__ import main
main()
"""


def read(*arguments: str, columns: int = 80, **environment: str) -> str:
    return on_a_terminal([sys.executable, "-c", READ, *arguments], columns=columns, environment=environment)[0]


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_bar_grows_within_the_width_and_is_gone_at_the_end(columns: int) -> None:
    shown = read(columns=columns)
    drawn = [part.rstrip() for part in plain(shown).replace("\n", "\r").split("\r") if "%" in part]

    assert [part.partition("%")[0] for part in dict.fromkeys(drawn)] == [
        f"Reading [red]:smile: {share}" for share in ("  0", " 50", "100")
    ]
    assert {min(columns - 27, 40)} == {part.count("━") + part.count("╸") + part.count("╺") for part in drawn}
    assert shown.endswith("\x1b[2Kdone\r\n")  # in the place of the bar


def test_what_has_no_size_has_no_share() -> None:
    shown = plain(read("pipe"))

    assert "Reading" in shown
    assert "%" not in shown


def test_what_is_soon_over_needs_no_bar() -> None:
    assert read("soon") == "done\r\n"


def test_a_terminal_that_knows_only_lines_has_none() -> None:
    assert read(TERM="dumb") == "done\r\n"


def test_a_file_gets_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", READ], capture_output=True, check=True)

    assert (done.stdout, done.stderr) == (b"done\n", b"")


def test_what_goes_into_a_file_meanwhile_is_not_the_terminals(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    into = ["bash", "-c", '"$0" -c "$1" each > "$2"', sys.executable, READ, str(file)]
    shown, status = on_a_terminal(into)

    assert status == 0
    assert "100%" in shown
    assert file.read_text() == "b'12345'b'67890'done\n"


def test_who_wants_no_colour_gets_a_bar_without() -> None:
    assert re.search(r"\x1b\[\d+m━", read())
    assert not re.search(r"\x1b\[[\d;]+m", read(NO_COLOR="1"))


def test_a_bar_is_erased_before_an_error_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(text(leaking(0.1)) + "{bad\n{bad\n")
    shown, status = on_a_terminal([sys.executable, "-c", REPLAY, str(file)])

    assert status == 2
    bar, _, error = shown.rpartition("\x1b[?25h\r\x1b[1A\x1b[2K")
    assert "Reading the trace" in bar
    assert "not JSON" in error
    assert "Reading the trace" not in error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_leaves_the_cursor(number: signal.Signals) -> None:
    shown, status = on_a_terminal([sys.executable, "-c", READ, "hang"], signal_after=("100%", number))

    assert status == -number
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    assert "Traceback" not in shown
