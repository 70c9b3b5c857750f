"""How far something long has come, on a terminal alone."""

from __future__ import annotations

import io
import sys

import pytest

from vllm_headroom.commands.cli import tell
from vllm_headroom.commands.progress import followed, shown


class Screen(io.StringIO):
    """Text that says it goes to a terminal."""

    def isatty(self) -> bool:
        return True


def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """Put a terminal of 60 columns in the place of standard error, on which each step is drawn."""
    stream = Screen()
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("vllm_headroom.commands.progress.BETWEEN_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def drawn(screen: Screen) -> list[str]:
    """Return what stood in the last line, one after the other."""
    return [part.removesuffix("\x1b[K").rstrip() for part in screen.getvalue().split("\r")[1:]]


def test_a_bar_grows_and_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn_on = screen(monkeypatch)
    items = [b"12345", b"67890"]

    assert list(followed(items, "Reading", 10, len, patience_seconds=0.0)) == items
    half, whole, nothing = drawn(drawn_on)
    assert half == "Reading   50%  ███████████████"
    assert whole == f"Reading  100%  {30 * '█'}"
    assert nothing == ""


def test_what_has_no_size_has_its_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn_on = screen(monkeypatch)
    list(followed(["a"], "Reading", None, len, patience_seconds=0.0))

    assert drawn(drawn_on) == ["Reading", ""]


def test_what_is_soon_over_needs_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn_on = screen(monkeypatch)
    list(followed(["a", "b"], "Reading", 2, len, patience_seconds=60.0))

    assert drawn(drawn_on) == []


def test_a_file_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    list(followed(["a"], "Reading", 1, len, patience_seconds=0.0))

    assert isinstance(sys.stderr, io.StringIO)
    assert sys.stderr.getvalue() == ""


def test_an_error_is_told_in_the_place_of_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn_on = screen(monkeypatch)
    reading = followed(["a", "b"], "Reading", 2, len, patience_seconds=0.0)
    next(reading)
    next(reading)
    tell("line 2 is no sample")

    assert drawn_on.getvalue().endswith("\r\x1b[Kline 2 is no sample\n")


def test_a_bar_gives_way_to_what_is_to_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    screen(monkeypatch)

    assert shown("step 1/4", 1.0, "1 open, 2 succeeded, 1 not, 1 OUT OF MEMORY") == (
        "step 1/4  100%  1 open, 2 succeeded, 1 not, 1 OUT OF MEMORY"
    )
    assert len(shown("step 1/4", 1.0, "1 open, 2 succeeded, 1 not")) == 59
