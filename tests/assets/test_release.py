"""The workflow for releases is well-formed, names actions by commits, and what is locked is locked with hashes."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

ROOT: Final = Path(__file__).parents[2]
TEXT: Final = (ROOT / "deploy" / "ci" / "release.yml").read_text(encoding="utf-8")
WORKFLOW: Final = yaml.safe_load(TEXT)
DOCKERFILE: Final = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def steps() -> Iterator[dict[str, Any]]:
    for job in WORKFLOW["jobs"].values():
        yield from job["steps"]


def test_every_action_is_named_by_its_commit_and_says_which_version_that_is() -> None:
    used = re.findall(r"uses: (\S+)(.*)", TEXT)

    assert len(used) == sum("uses" in step for step in steps())
    for action, comment in used:
        assert re.fullmatch(r"[a-z-]+/[a-z-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action


def test_every_script_is_one_that_bash_can_read() -> None:
    for step in steps():
        if "run" in step:
            done = subprocess.run(["bash", "-n"], input=step["run"], text=True, capture_output=True, check=False)
            assert (done.returncode, done.stderr) == (0, "")


def test_it_builds_on_the_base_that_the_dockerfile_names() -> None:
    (base,) = re.findall(r"^ARG PYTHON_IMAGE=(.+)$", DOCKERFILE, re.MULTILINE)

    assert WORKFLOW["env"]["PYTHON_IMAGE"] == base


def test_the_image_is_built_on_a_digest_and_leaves_with_its_parts_its_origin_and_a_signature() -> None:
    base, build, sign = ("imagetools inspect", "docker/build-push-action", "cosign sign --yes")
    said = [(step.get("run") or step["uses"], step) for step in steps()]
    named = {key: next(step for text, step in said if key in text) for key in (base, build, sign)}
    digest, options = named[base], named[build]["with"]

    assert 'echo "image=$PYTHON_IMAGE@$digest"' in digest["run"]
    assert f"PYTHON_IMAGE=${{{{ steps.{digest['id']}.outputs.image }}}}" in options["build-args"]
    assert (options["sbom"], options["provenance"]) == (True, "mode=max")


@pytest.mark.parametrize("name", ["runtime.txt", "dev.txt"])
def test_every_locked_package_has_its_hashes(name: str) -> None:
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    locked = re.findall(
        r"^(?P<name>[a-z0-9][\w.-]*)==\S+.*?\\\n((?:    --hash=sha256:[0-9a-f]{64}.*\n)+)", text, re.MULTILINE
    )

    assert len(locked) == len(re.findall(r"^[a-z0-9][\w.-]*==", text, re.MULTILINE)) > 15
    assert "--require-hashes" in DOCKERFILE
