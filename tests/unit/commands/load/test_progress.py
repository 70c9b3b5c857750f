from __future__ import annotations

import io
import sys

import pytest

from tests.unit.commands.load.asking import tally
from vllm_headroom.commands.load.answer import Answer, Outcome
from vllm_headroom.commands.load.progress import Bar, Lines, screen
from vllm_headroom.commands.load.tally import Tally


class Terminal(io.StringIO):
    """Text that says it goes to a terminal."""

    def isatty(self) -> bool:
        return True


def counted() -> Tally:
    made = tally()
    for outcome in (Outcome.SUCCEEDED, Outcome.SUCCEEDED, Outcome.CLOSED, Outcome.OUT_OF_MEMORY):
        made.begin()
        made.end(Answer(outcome=outcome))
    made.begin()
    return made


def test_elsewhere_there_is_a_line_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    lines = screen()
    lines.begin("step 2/4: 75%, 8 clients", 60.0)
    for second in range(23):
        lines.show(counted(), float(second))
    lines.end(counted(), 61.0)
    lines.show(counted(), 62.0)

    assert isinstance(lines, Lines)
    assert capsys.readouterr().err.splitlines() == [
        "step 2/4: 75%, 8 clients, 60 s",
        "   10 s  1 open, 2 succeeded, 1 not, 1 OUT OF MEMORY",
        "   20 s  1 open, 2 succeeded, 1 not, 1 OUT OF MEMORY",
        "   61 s  1 open, 2 succeeded, 1 not, 1 OUT OF MEMORY; over",
    ]


def test_on_a_terminal_there_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    bars = screen()
    bars.show(tally(), 0.0)
    bars.begin("step 1/4: 50%, 5 clients", 10.0)
    bars.show(counted(), 5.0)
    bars.end(counted(), 10.0)
    bars.show(counted(), 11.0)

    assert isinstance(bars, Bar)
    shown = stream.getvalue()
    assert "step 1/4: 50%, 5 clients" in shown
    assert "1 open, 2 succeeded, 1 not, 1 OUT OF MEMORY" in shown
