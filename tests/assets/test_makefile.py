"""What is typed first does what README says."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.commands.demo.test_verdicts import played, states

ROOT = Path(__file__).parents[2]
OWN = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "ENGINE_URL", "SCENARIO"))}
MINUTE = 60.0


def last_command(*words: str) -> list[str]:
    """Return the words of the last command that make would run."""
    if (make := shutil.which("make")) is None:
        pytest.skip("make is not on the PATH")
    dry = subprocess.run([make, "-n", *words], cwd=ROOT, env=OWN, capture_output=True, text=True, check=True)
    return shlex.split(dry.stdout.splitlines()[-1])


@pytest.mark.parametrize(("variables", "scenario"), [((), "healthy"), (("SCENARIO=leak",), "leak")])
def test_run_plays_the_scenario_that_is_asked_for(variables: tuple[str, ...], scenario: str) -> None:
    program, *options = last_command("run", *variables)

    assert program.endswith("/vllm-headroom")
    assert options[:3] == ["demo", "--scenario", scenario]


def test_run_reads_a_real_server_that_is_named() -> None:
    assert last_command("run", "ENGINE_URL=http://host:8000")[1:] == ["run", "--engine-url", "http://host:8000"]


def test_run_shows_the_leak_in_less_than_a_minute() -> None:
    speed = float(last_command("run", "SCENARIO=leak")[-1])

    pages = played("leak", speed * MINUTE / 3600)

    assert any("leaking" in states(page) for page in pages)


def test_what_runs_before_a_merge_tries_the_same_examples_every_time() -> None:
    assert "--hypothesis-profile=ci" in last_command("check")


def test_the_image_that_is_built_is_the_one_whose_size_is_printed() -> None:
    assert last_command("image", "DOCKER=podman")[:4] == ["podman", "image", "inspect", "vllm-headroom:local"]
