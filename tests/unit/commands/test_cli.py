"""The one runner of all commands."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any, Final

import pytest

from tests.command import OWN
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.cli import Command, execute
from vllm_headroom_tools.conclusion import Conclusion, Finding, Report


def command(run: Callable[[Namespace], Any]) -> Command:
    return Command(usage="%(prog)s", description="", epilog="", options=lambda _parser: None, run=run)


def answering(text: str) -> Report:
    finding = Finding("it", Conclusion.NOT_GOOD, "is bad", ("fix it",))
    return Report(
        verdict=Conclusion.NOT_GOOD,
        headline="bad",
        findings=[finding],
        data={"text": text},
        lines=(text, "the end"),
        exit_status=7,
    )


def test_text_stays_on_its_line_and_sends_nothing_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    status = execute(command(lambda _given: answering("\x1b[31mred\nand \u202emore")), "test", [])

    assert (status, capsys.readouterr().out) == (7, "\\x1b[31mred\\x0aand \\x202emore\nthe end\n")


def test_json_is_one_indented_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(command(lambda _given: answering("\x1b")), "test", ["--json"]) == 7

    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert json.loads(printed) == {
        "schema": "https://vllm-headroom.github.io/vllm-headroom/schemas/test-1.json",
        "command": "test",
        "status": 7,
        "verdict": "not_good",
        "headline": "bad",
        "findings": [{"subject": "it", "verdict": "not_good", "text": "is bad", "fix": ["fix it"]}],
        "data": {"text": "\x1b"},
    }
    assert printed.startswith('{\n  "schema": ')


@pytest.mark.parametrize("words", [["--json", "--colour"], ["--colour", "--json"]])
def test_a_mistake_is_an_object_too(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(command(lambda _given: answering("")), "test", words) == 2

    printed, stderr_text = capsys.readouterr()
    document = json.loads(printed)
    assert (document["command"], document["status"], document["verdict"]) == ("test", 2, "cannot_tell")
    assert document["headline"] == document["findings"][0]["text"] == "--colour: not an option, see --help"
    assert stderr_text == "vllm-headroom test: --colour: not an option, see --help\n"


def test_a_command_without_an_answer_says_why_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    def run(_given: Namespace) -> Report:
        raise BadInput("line 1\nof a file")

    assert execute(command(run), "test", []) == 2
    assert capsys.readouterr() == ("", "vllm-headroom test: line 1\\x0aof a file\n")


LIVE: Final = """
import asyncio, sys
from vllm_headroom_tools import cli
from vllm_headroom_tools import run as command
async def daemon(given):
    print(type(asyncio.get_running_loop()).__module__, flush=True)
    {end}
command.COMMAND = cli.Command(usage="", description="", epilog="", options=lambda parser: None, run=daemon)
cli.start("run", [])
"""


def live(end: str) -> subprocess.CompletedProcess[str]:
    code = LIVE.format(end=end)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60, env=OWN
    )


def test_the_daemon_runs_on_uvloop_and_its_status_is_the_exit_status() -> None:
    process = live("return 3")

    assert (process.returncode, process.stdout, process.stderr) == (3, "uvloop\n", "")


def test_an_error_of_its_own_ends_the_process_with_its_traceback_and_status_1() -> None:
    process = live("raise RuntimeError('the sampler fell over')")

    assert process.returncode == 1
    assert process.stderr.startswith("Traceback (most recent call last):\n")
    assert process.stderr.endswith("\nRuntimeError: the sampler fell over\n")
