"""What a terminal adds: colours, and lines that keep to its width."""

from __future__ import annotations

import io
import re
import subprocess
from pathlib import Path

import pytest

from tests.unit.commands.replay.traces import leaking, text
from tests.unit.commands.screen import HEADROOM, on_a_terminal, plain
from vllm_headroom_tools.terminal import build_console, render_line, wrap_line


class Screen(io.StringIO):
    """Text that says it goes to a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("word", ["NO GO", "NOT GOOD", "FAILED", "MISSING", "LEAKING", "OUT OF MEMORY"])
def test_what_is_bad_is_red(word: str) -> None:
    assert wrap_line(f"GPU 0: {word}; and more", 200).markup == f"GPU 0: [bold red]{word}[/bold red]; and more"


def test_what_is_good_is_green_and_what_is_not_known_yellow() -> None:
    assert wrap_line("GO after 3 s", 200).markup == "[green]GO[/green] after 3 s"
    assert wrap_line("CANNOT TELL", 200).markup == "[yellow]CANNOT TELL[/yellow]"


@pytest.mark.parametrize("line", ["the state missing", "HEADROOM_MISSING=1", "going", "DRIVER_FAILED"])
def test_words_that_are_no_verdict_keep_their_colour(line: str) -> None:
    assert not wrap_line(line, 200).spans


def test_a_word_that_goes_on_in_the_next_line_keeps_its_colour() -> None:
    assert wrap_line("it ends OUT OF MEMORY", 12).markup == "it ends [bold red]OUT\n  OF MEMORY[/bold red]"


def test_a_long_line_goes_on_below_its_last_column() -> None:
    assert wrap_line("ok       health       healthy after three seconds of waiting for it", 40).plain.splitlines() == [
        "ok       health       healthy after",
        "                    three seconds of",
        "                    waiting for it",
    ]


def test_what_has_no_blank_is_left_to_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")

    assert render_line(f"see {'x' * 90} there", Screen()).splitlines() == ["see", f"  {'x' * 90}", "  there"]


@pytest.mark.parametrize("columns", [30, 40, 80])
def test_no_line_is_wider_than_the_terminal(columns: int) -> None:
    line = "GPU 0 (GPU-11111111-2222) NVIDIA H100: 1.2 GiB free of 79 GiB, vLLM asks for 71"
    lines = wrap_line(line, columns).plain.splitlines()

    assert all(len(part) <= columns for part in lines)
    assert " ".join(" ".join(lines).split()) == line


def test_a_file_gets_each_line_whole_and_plain() -> None:
    assert render_line("FAILED " * 90, io.StringIO()) == "FAILED " * 90


def test_brackets_numbers_and_names_of_pictures_are_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    line = "--gpus [0] [red]1[/red] :smile: 'x' None http://gpu-7:9839 \\[bold]"

    assert render_line(line, Screen()) == line


def test_what_others_write_above_a_bar_is_text_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()
    build_console(screen).print("[red]1[/red] :smile: None", end="")

    assert screen.getvalue() == "[red]1[/red] :smile: None"


@pytest.fixture
def trace(tmp_path: Path) -> str:
    file = tmp_path / "trace.jsonl"
    file.write_text(text(leaking(3.0)))
    return str(file)


@pytest.mark.parametrize(("columns", "widest"), [(40, 40), (80, 80), (200, 160)])
def test_a_command_is_coloured_and_fits_with_its_verdict_before_the_picture(
    trace: str, columns: int, widest: int
) -> None:
    written, status = on_a_terminal([*HEADROOM, "replay", "--fail-on-leak", trace], columns=columns)

    assert status == 1
    assert 0 < written.index("\x1b[1;31mLEAKING\x1b[0m") < written.index("▲")
    assert max(map(len, plain(written).splitlines())) == widest


def test_who_wants_no_colour_gets_none(trace: str) -> None:
    written, _ = on_a_terminal([*HEADROOM, "replay", trace], environment={"NO_COLOR": "1"})

    assert "LEAKING" in written
    assert set(re.findall(r"\x1b\[[\d;]*m", written)) <= {"\x1b[1m", "\x1b[0m"}  # bold is no colour


def test_a_terminal_that_knows_only_lines_gets_what_a_file_gets(trace: str) -> None:
    words = [*HEADROOM, "replay", trace]
    file = subprocess.run(words, capture_output=True, check=True, text=True).stdout
    written, _ = on_a_terminal(words, environment={"TERM": "dumb"})

    assert written.replace("\r\n", "\n") == file


def test_a_mistake_is_reported_within_the_width_too() -> None:
    written, status = on_a_terminal([*HEADROOM, "plan"], columns=60)

    assert status == 2
    assert "needs --model" in written
    assert max(map(len, plain(written).splitlines())) <= 60


MODEL = ("--layers", "80", "--kv-heads", "8", "--head-size", "128", "--hidden-size", "8192", "--vocabulary", "128256")
PLAN = (*HEADROOM, "plan", *MODEL, "--parameters", "70.6B", "--gpu-memory", "80GiB", "--max-model-len", "8192")


def test_the_headline_of_a_verdict_is_bold_and_coloured_where_it_is_broken_too() -> None:
    shown, status = on_a_terminal(PLAN)

    assert status == 1
    (first_headline, second) = re.findall(r"\x1b\[1;31m(.*?)\x1b\[0m", shown)
    assert (first_headline[:16], second) == ("It does not fit:", 'vLLM: "torch.OutOfMemoryError: CUDA out of memory."')


def test_a_plan_of_80_columns_has_no_note_below_its_numbers() -> None:
    lines = plain(on_a_terminal(PLAN)[0]).splitlines()

    (place,) = (number for number, line in enumerate(lines) if line.startswith("  activations "))
    assert lines[place + 1].strip() == "logits of 1,024 sequences"
    assert lines[place + 1].index("logits") == lines[place].index("8,192")
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(("mark", "style"), [("ok", "green"), ("unknown", "yellow"), ("skipped", "yellow")])
def test_a_mark_is_coloured_at_the_beginning_of_a_line_alone(mark: str, style: str) -> None:
    assert wrap_line(f"{mark}   gpus  {mark}  2", 200).markup == f"[{style}]{mark}[/{style}]   gpus  {mark}  2"
