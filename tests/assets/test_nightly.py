"""The nightly workflow is well-formed, and runs this product with options that it has."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from vllm_headroom_tools.cli import build_parser

ROOT: Final = Path(__file__).parents[2]
TEXT: Final = (ROOT / ".github" / "workflows" / "nightly.yml").read_text(encoding="utf-8")
WORKFLOW: Final = yaml.safe_load(TEXT)
README: Final = (ROOT / "deploy" / "ci" / "README.md").read_text(encoding="utf-8")
ENVIRONMENT: Final = {**WORKFLOW["env"], "TRACE": "nightly.jsonl"}


def read(words: Sequence[str]) -> Namespace:
    """Return the options of one of our commands, which is the first word."""
    command = importlib.import_module(f"vllm_headroom_tools.{words[0]}.command").COMMAND
    return build_parser(command, words[0]).read(words[1:])


def steps() -> Iterator[dict[str, Any]]:
    for job in WORKFLOW["jobs"].values():
        yield from job["steps"]


def commands(script: str) -> Iterator[Sequence[str]]:
    """Yield the words of each command of ours in a shell script."""
    for line in re.sub(r"\\\n\s*", " ", script).splitlines():
        replaced = re.sub(r"\$(\w+)", lambda match: str(ENVIRONMENT.get(match[1], match[0])), line)
        words = shlex.split(replaced)
        if words[:1] == ["vllm-headroom"]:
            yield words[1:]


OURS: Final = [words for step in steps() for words in commands(step.get("run", ""))]


def test_the_workflow_does_all_that_it_is_there_for_in_order() -> None:
    assert [words[0] for words in OURS] == ["preflight", "smoke", "load", "check"]


@pytest.mark.parametrize("words", OURS, ids=[words[0] for words in OURS])
def test_every_command_understands_its_options(words: Sequence[str]) -> None:
    read(words)


def test_the_gitlab_example_understands_its_options() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL)
    (words,) = (words for line in yaml.safe_load(block)["memory"]["script"] for words in commands(line))

    assert read(words).junit == Path("report.xml")


def test_every_step_is_an_action_of_a_version_or_a_script_that_bash_can_read() -> None:
    for step in steps():
        assert ("uses" in step) != ("run" in step), step
        if "uses" in step:
            assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", step["uses"]), "a tag can be moved, a commit cannot"
        else:
            done = subprocess.run(["bash", "-n"], input=step["run"], text=True, capture_output=True, check=False)
            assert (done.returncode, done.stderr) == (0, "")


def test_jobs_and_expressions_name_what_there_is() -> None:
    jobs = WORKFLOW["jobs"]
    keys = set(jobs["record"]["strategy"]["matrix"]["include"][0])

    assert jobs["check"]["needs"] in jobs
    assert set(re.findall(r"matrix\.(\w+)", TEXT)) == keys
    assert all(set(row) == keys for row in jobs["record"]["strategy"]["matrix"]["include"])
    assert WORKFLOW[True]["schedule"]  # YAML 1.1 reads "on" as true; GitHub does not


def test_what_is_checked_is_what_was_recorded() -> None:
    (check,) = (read(words) for words in OURS if words[0] == "check")
    recorded = {f"{row['version']}.jsonl" for row in WORKFLOW["jobs"]["record"]["strategy"]["matrix"]["include"]}

    assert {check.trace, check.baseline} == recorded


def test_it_waits_for_no_runner_that_nobody_has() -> None:
    assert all("vars.GPU_RUNNER != ''" in job["if"] for job in WORKFLOW["jobs"].values())
