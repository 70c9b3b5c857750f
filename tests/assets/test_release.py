"""Workflows name actions by commits, the release is built as it should be, and what is locked is locked with hashes."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

ROOT: Final = Path(__file__).parents[2]
WORKFLOWS: Final = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS: Final = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*_*.yml"))
TEXT: Final = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
WORKFLOW: Final = yaml.safe_load(TEXT)
DOCKERFILE: Final = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def steps_of(workflow: Any) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job["steps"]


def steps() -> Iterator[dict[str, Any]]:
    return steps_of(WORKFLOW)


each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


@each_workflow
def test_every_action_is_named_by_its_commit_and_says_which_version_that_is(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    used = re.findall(r"uses: (\S+)(.*)", text)

    assert len(used) == sum("uses" in step for step in steps_of(yaml.safe_load(text)))
    for action, comment in used:
        assert re.fullmatch(r"[a-z-]+/[a-z-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action


@each_workflow
def test_every_script_is_one_that_bash_can_read(path: Path) -> None:
    for step in steps_of(yaml.safe_load(path.read_text(encoding="utf-8"))):
        if "run" in step:
            done = subprocess.run(["bash", "-n"], input=step["run"], text=True, capture_output=True, check=False)
            assert (done.returncode, done.stderr) == (0, "")


def test_what_runs_before_a_merge_is_what_ci_runs_on_a_bare_machine() -> None:
    checks = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text(encoding="utf-8"))

    assert ".ci/run" in [step.get("run") for step in steps_of(checks)]
    assert {"push", "pull_request"} <= checks[True].keys()  # YAML 1.1 reads "on" as true; GitHub does not


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_has_what_github_requires(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    names = [field["id"] for field in form["body"]]

    assert {"name", "description", "body"} <= form.keys()
    assert len(names) == len(set(names))
    assert {field["type"] for field in form["body"]} <= {"dropdown", "input", "textarea"}
    assert all(field["attributes"]["label"] for field in form["body"])


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
