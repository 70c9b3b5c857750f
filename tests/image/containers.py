"""Containers, and the daemon in one."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from tests.process import Page, eventually

FOLDER: Final = Path(os.environ.get("IMAGE_FOLDER", ".image")).resolve()
IMAGE: Final = "localhost/vllm-headroom:image-test"
HARDENED: Final = ("--read-only", "--cap-drop=all", "--security-opt=no-new-privileges")
"""What the manifests ask for."""

ALONE: Final = "--network=none"
"""A network of the container's own with nothing but loopback, so that no port is taken."""

_GET: Final = """\
import sys, urllib.error, urllib.request
try:
    answer = urllib.request.urlopen(sys.argv[1], timeout=10)
except urllib.error.HTTPError as error:
    answer = error
print(answer.status, answer.read().decode(), sep="\\n", end="")
"""


def containers(*words: str) -> str:
    """Return what the container engine prints; fail where it does."""
    done = subprocess.run([FOLDER / "containers", *words], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


def options(environment: Mapping[str, str], mounts: Mapping[Path, Path]) -> tuple[str, ...]:
    """Return the options that give a container variables, and files of this machine to read."""
    volumes = (f"--volume={here}:{there}:ro" for here, there in mounts.items())
    return (*volumes, *(f"--env={name}={value}" for name, value in environment.items()))


class Container:
    """A running container."""

    def __init__(self, name: str) -> None:
        self.name = name

    def inspect(self) -> dict[str, Any]:
        (document,) = json.loads(containers("container", "inspect", self.name))
        facts: dict[str, Any] = document
        return facts

    def log(self) -> str:
        done = subprocess.run([FOLDER / "containers", "logs", self.name], capture_output=True, text=True, check=True)
        return done.stdout + done.stderr

    def run(self, *words: str) -> str:
        """Return what a program prints inside; fail where it does."""
        return containers("exec", self.name, *words)

    def python(self, code: str, *arguments: str) -> str:
        """Return what `code` prints inside."""
        return self.run("python3", "-c", code, *arguments)

    def get(self, path: str) -> tuple[int, str]:
        """Return the status and the body of what the daemon inside serves."""
        status, _, body = self.python(_GET, f"http://127.0.0.1:9839{path}").partition("\n")
        return int(status), body

    def sampled(self) -> None:
        """Wait for the first sample."""
        eventually(lambda: "first sample published" in self.log(), "the daemon samples")

    def page(self) -> Page:
        status, body = self.get("/metrics")
        assert status == 200
        return Page(body)

    def stop(self) -> tuple[int, float]:
        """Send SIGTERM; return the exit status and the seconds until the process had ended."""
        began_seconds = time.time()
        containers("kill", "--signal=TERM", self.name)
        state = eventually(self._ended, f"{self.name} ends")
        finished = datetime.fromisoformat(state["FinishedAt"])
        return int(state["ExitCode"]), finished.timestamp() - began_seconds

    def _ended(self) -> dict[str, Any] | None:
        state: dict[str, Any] = self.inspect()["State"]
        return None if state["Running"] else state


@contextlib.contextmanager
def container(*options: str, command: tuple[str, ...] = ()) -> Iterator[Container]:
    """Run the image, and remove the container at the end."""
    name = f"headroom-{uuid.uuid4().hex[:8]}"
    containers("run", "--detach", f"--name={name}", *options, IMAGE, *command)
    try:
        yield Container(name)
    finally:
        with contextlib.suppress(AssertionError):  # it may have ended
            containers("kill", name)
        containers("rm", "--force", "--volumes", name)
