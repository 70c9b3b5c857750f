from __future__ import annotations

import sys
from typing import Final

import pytest

from tests.unit.commands.load.asking import tally
from tests.unit.commands.screen import on_a_terminal, plain
from vllm_headroom_tools.load.screen import Screen
from vllm_headroom_tools.load.stream import Completion, Outcome
from vllm_headroom_tools.load.tally import Tally


def counted() -> Tally:
    new_tally = tally()
    for outcome in (Outcome.SUCCEEDED, Outcome.SUCCEEDED, Outcome.CLOSED, Outcome.OUT_OF_MEMORY):
        new_tally.started_requests += 1
        new_tally.add_end(Completion(outcome=outcome))
    new_tally.started_requests += 1
    return new_tally


def test_elsewhere_there_is_a_line_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Screen()
    lines.begin("step 2/4: 75%, 8 clients", 60.0)
    for second in range(23):
        lines.show(counted(), float(second))
    lines.show(counted(), 61.0, is_over=True)
    lines.show(counted(), 62.0)

    assert capsys.readouterr().err.splitlines() == [
        "step 2/4: 75%, 8 clients, 60 s",
        "   10 s  1 open, 2 succeeded, 1 not, 1 OUT OF MEMORY",
        "   20 s  1 open, 2 succeeded, 1 not, 1 OUT OF MEMORY",
        "   61 s  1 open, 2 succeeded, 1 not, 1 OUT OF MEMORY; over",
    ]


DRAW: Final = """
from tests.unit.commands.load.test_progress import counted
from vllm_headroom_tools.load.screen import Screen
bars = Screen()
bars.show(counted(), 0.0)
for number in (1, 2):
    bars.begin(f"step {number}/4: 50%, 5 clients", 10.0)
    bars.show(counted(), 5.0)
    bars.show(counted(), 10.0, is_over=True)
    bars.show(counted(), 11.0)
print("over")
"""


@pytest.mark.parametrize("columns", [80, 200])
def test_on_a_terminal_there_is_a_bar_for_each_step_which_stays(columns: int) -> None:
    shown, status = on_a_terminal([sys.executable, "-c", DRAW], columns=columns)
    *bars, over, _ = plain(shown).split("\n")

    assert (status, over) == (0, "over\r")
    assert max(map(len, plain(shown).replace("\n", "\r").split("\r"))) <= columns
    for number, line in enumerate(bars, start=1):
        drawn_bar = line.rstrip("\r").rsplit("\r", 1)[-1]
        assert drawn_bar.startswith(
            f"step {number}/4: 50%, 5 clients 100% 1 open, 2 succeeded, 1 not, 1 OUT OF MEMORY ━"
        )
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_a_narrow_terminal_has_what_fits() -> None:
    shown, _ = on_a_terminal([sys.executable, "-c", DRAW], columns=40)

    assert max(map(len, plain(shown).replace("\n", "\r").split("\r"))) <= 40
