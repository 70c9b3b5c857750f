"""Workflows name actions by commits, the release is built as it should be, and what is locked is locked with hashes."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tomllib
import venv
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
JOBS: Final[dict[str, Any]] = WORKFLOW["jobs"]
PUBLISHES: Final = ("docker://", "helm push", "gh-action-pypi-publish", "cosign sign", "push: true")
DOCKERFILE: Final = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def steps_of(workflow: Any) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job["steps"]


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


def test_the_tests_run_on_every_python_that_the_package_promises() -> None:
    checks = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    promised = [name.rpartition(" ")[2] for name in project["classifiers"] if "Python :: 3." in name]

    assert checks["jobs"]["check"]["strategy"]["matrix"]["python"] == promised


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_has_what_github_requires(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    names = [field["id"] for field in form["body"]]

    assert {"name", "description", "body"} <= form.keys()
    assert len(names) == len(set(names))
    assert {field["type"] for field in form["body"]} <= {"dropdown", "input", "textarea"}
    assert all(field["attributes"]["label"] for field in form["body"])


def texts(job: str) -> str:
    return "\n".join(step.get("run") or step["uses"] for step in JOBS[job]["steps"])


def before(job: str) -> set[str]:
    """Return every job that has to end well before this one begins."""
    needed = set(JOBS[job].get("needs", []))
    return needed.union(*(before(name) for name in needed))


def test_nothing_is_published_before_tests_image_and_scan_nor_outside_of_a_tag() -> None:
    publishing = {job for job in JOBS if any(command in texts(job) for command in PUBLISHES)}

    assert publishing == {"publish-image", "publish-package"}
    for job in publishing:
        assert {"test", "package", "image"} <= before(job)
        assert JOBS[job]["if"] == "github.event_name == 'push'"
    assert "publish-image" in before("publish-package"), "a package that names an image that is not there helps nobody"
    assert [job for job in JOBS if "permissions" in JOBS[job]] == ["publish-image", "publish-package"]
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert WORKFLOW[True]["push"] == {"tags": ["v*"]}  # YAML 1.1 reads "on" as true; GitHub does not


def test_a_dry_run_does_everything_but_publish() -> None:
    assert {"workflow_dispatch", "pull_request"} <= WORKFLOW[True].keys()
    assert [job for job in JOBS if "if" not in JOBS[job]] == ["test", "package", "image"]
    assert ".ci/run" in texts("test")
    assert "trivy-action" in texts("image")
    assert texts("image").index("make image-test") < texts("image").index("trivy-action")
    (build,) = (step for step in JOBS["image"]["steps"] if "build-push-action" in step.get("uses", ""))
    assert "push" not in build["with"]
    assert (build["with"]["sbom"], build["with"]["provenance"]) == (True, "mode=max")


def test_what_leaves_is_what_was_built_and_is_signed_by_its_digest() -> None:
    steps_text = texts("publish-image")

    assert "skopeo copy --all --digestfile digest oci-archive:image.tar" in steps_text
    assert 'cosign sign --yes "$IMAGE@$DIGEST"' in steps_text
    assert "build" not in steps_text.replace("attest-build-provenance", "")
    assert "attest-build-provenance" in texts("publish-package")


def test_the_base_is_named_by_its_digest_and_build_tools_by_their_hashes() -> None:
    (base,) = re.findall(r"^ARG PYTHON_IMAGE=(.+)$", DOCKERFILE, re.MULTILINE)
    installs = re.findall(r"pip(?:\"|')? [^&|]*?\binstall\b[^&|]*", f"{DOCKERFILE}\n{TEXT}".replace("\\\n", " "))
    ours = [command for command in installs if "wheels/*.whl" not in command]

    assert re.fullmatch(r"docker\.io/library/python:3\.13-slim-trixie@sha256:[0-9a-f]{64}", base)
    assert len(ours) == 4
    assert [entry for entry in ours if "--require-hashes" not in entry] == []
    assert "--no-build-isolation" in DOCKERFILE
    assert "--no-isolation" in TEXT


def written(folder: Path, changelog: str, version: str = "1.2.3", chart: str = "1.2.3") -> Path:
    """Write a repository of this version with this changelog, and return its release check."""
    (folder / "pyproject.toml").write_text(f'[project]\nversion = "{version}"\n')
    (folder / "Dockerfile").write_text(f"ARG VERSION={version}\n")
    (folder / "CHANGELOG.md").write_text(changelog)
    for name in ("vllm-headroom", "vllm-headroom-cluster"):
        path = folder / "deploy" / "helm" / name / "Chart.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(f"version: {chart}\nappVersion: {version}\n")
    script = folder / ".github" / "check_release.py"
    script.parent.mkdir()
    script.write_text((ROOT / ".github" / "check_release.py").read_text())
    return script


@pytest.mark.parametrize(
    ("changelog", "tag", "chart", "fault"),
    [
        ("## [1.2.3] - 2026-11-25\n### Added\n- A.\n\n## [1.2.2] - 2026-01-01\n- B.\n", "v1.2.3", "1.2.3", ""),
        ("## [Unreleased]\n- A.\n", None, "1.2.3", ""),
        ("## [1.2.3] - 2026-11-25\n- A.\n", "v1.2.4", "1.2.3", "the tag is v1.2.4, pyproject.toml has 1.2.3"),
        ("## [1.2.3] - 2026-11-25\n- A.\n", "v1.2.3", "1.2.2", "vllm-headroom/Chart.yaml has 1.2.2"),
        ("## [Unreleased]\n- A.\n", "v1.2.3", "1.2.3", "CHANGELOG.md has no section '## [1.2.3] - YYYY-MM-DD'"),
        ("## [1.2.3] - 2026-11-25\n\n## [1.2.2] - 2026-01-01\n- B.\n", "v1.2.3", "1.2.3", "with text"),
    ],
)
def test_a_tag_is_released_with_its_version_everywhere_and_its_changes(
    tmp_path: Path, changelog: str, tag: str | None, chart: str, fault: str
) -> None:
    command = [sys.executable, str(written(tmp_path, changelog, chart=chart)), *([tag] if tag else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (done.returncode, fault in done.stderr) == (int(bool(fault)), True), done.stderr


def test_this_tree_passes_the_check_of_a_dry_run() -> None:
    done = subprocess.run([sys.executable, ".github/check_release.py"], cwd=ROOT, capture_output=True, check=False)

    assert (done.returncode, done.stderr) == (0, b"")


def test_the_package_builds_with_the_locked_tools_twice_the_same(tmp_path: Path) -> None:
    """What the job `package` and the Dockerfile do, without a registry of images."""
    venv.create(tmp_path / "tools")
    python = str(tmp_path / "tools" / "bin" / "python")
    locked = ["--quiet", "--disable-pip-version-check", "--require-hashes", "--requirement", "requirements/build.txt"]
    install = [sys.executable, "-m", "pip", "--python", python, "install", *locked]
    installed = subprocess.run(install, cwd=ROOT, capture_output=True, check=False)
    if installed.returncode:
        pytest.skip("no package index answers: the build tools are not installed")
    digests = []
    for name in ("first", "second"):
        command = [python, "-m", "build", "--no-isolation", "--outdir", str(tmp_path / name)]
        stamp = {**os.environ, "SOURCE_DATE_EPOCH": "1760000000"}
        subprocess.run(command, cwd=ROOT, env=stamp, capture_output=True, check=True)
        digests.append({path.name: hashlib.sha256(path.read_bytes()).digest() for path in (tmp_path / name).iterdir()})

    assert digests[0] == digests[1]
    assert {Path(name).suffix for name in digests[0]} == {".whl", ".gz"}


@pytest.mark.parametrize("name", ["runtime.txt", "dev.txt", "build.txt", "audit.txt"])
def test_every_locked_package_has_its_hashes(name: str) -> None:
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    locked = re.findall(
        r"^(?P<name>[a-z0-9][\w.-]*)==\S+.*?\\\n((?:    --hash=sha256:[0-9a-f]{64}.*\n)+)", text, re.MULTILINE
    )

    assert len(locked) == len(re.findall(r"^[a-z0-9][\w.-]*==", text, re.MULTILINE)) > 5
