"""What README.md and docs/ show of a terminal is what a terminal shows."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Final

import pytest

from tests.assets import console, terminal
from tests.assets.console import Block, Step
from tests.assets.scenes import ENGINE, SCENES
from tests.assets.terminal import Said, Scene, Terminal

BLOCKS: Final = console.blocks()
TYPED: Final = [block for block in BLOCKS if block.language == "console"]
BESIDE_VLLM: Final = [block for block in TYPED if block.needs == "vLLM"]
RUN: Final = [block for block in TYPED if block.needs is None]
DEADLINE_SECONDS: Final = 180.0
"""Far beyond what a simulated hour takes on a machine that is busy."""
PAUSE_SECONDS: Final = 0.2
NOBODY: Final = "127.0.0.1:1"
LANGUAGES: Final = {"console", "yaml", "ini", "promql", "text"}
"""What is typed is in console blocks: in one of another language nothing would be run."""


def test_no_block_is_overlooked() -> None:
    fences = sum(page.read_text(encoding="utf-8").count("```") for page in console.PAGES)

    assert fences == 2 * len(BLOCKS)


def test_a_block_says_what_it_is(subtests: pytest.Subtests) -> None:
    for block in BLOCKS:
        with subtests.test(str(block)):
            assert block.language in LANGUAGES
            assert (block.language == "console") == block.body.startswith("$ ")
            assert block.needs is None or block.needs in console.NEEDS
            assert block.needs is not None or block.scene is None or block.scene in SCENES


@pytest.mark.parametrize("block", RUN, ids=str)
def test_a_command_says_what_the_page_shows(block: Block, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if "curl " in block.body and shutil.which("curl") is None:
        pytest.skip("curl is not on the PATH (Debian: curl)")
    if "promtool " in block.body and shutil.which("promtool") is None:
        pytest.skip("promtool is not on the PATH: install Prometheus (Debian: prometheus)")
    with SCENES[block.scene or "empty folder"](tmp_path) as scene, terminal.opened(tmp_path, scene) as typed:
        for step in block.steps:
            answer = _said(typed, step)
            if request.config.getoption("--update-golden") and not step.agrees(answer.text):
                console.show(block, step, answer.text)
            else:
                assert step.agrees(answer.text), f"$ {step.command}\n{answer.text}"
            assert step.shown or not answer.status, f"$ {step.command}\n{answer.text}"


@pytest.mark.parametrize("block", BESIDE_VLLM, ids=str)
def test_a_command_that_is_not_run_beside_vllm_takes_its_options(block: Block, tmp_path: Path) -> None:
    with terminal.opened(tmp_path, Scene(real={ENGINE: NOBODY})) as typed:
        for step in block.steps:
            printed = typed.says(step.command).text

            assert "Connection refused" in printed, printed


def _said(typed: Terminal, step: Step) -> Said:
    """Type a command once; again and again until it says what is shown where a daemon runs, which takes its time."""
    ends = time.monotonic() + DEADLINE_SECONDS
    answer = typed.says(step.command)
    while typed.serves and not step.agrees(answer.text) and time.monotonic() < ends:
        time.sleep(PAUSE_SECONDS)
        answer = typed.says(step.command)
    return answer
