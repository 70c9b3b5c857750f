"""A real vLLM with the probe in it, started for one test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engine.serving import FOLDER, HERE, Engine, is_answering
from tests.fakes.ports import free_port
from tests.process import eventually
from vllm_headroom_tools.probe.install import install

START_SECONDS = 900.0
"""40 s on a machine that has nothing else to do."""
Document = dict[str, Any]


def read_reports(folder: Path) -> dict[str, Document]:
    """Return the newest of what each process with a probe says, by name."""
    documents = [json.loads(path.read_text()) for path in folder.glob("*-*[0-9].json")]
    return {document["process_name"]: document for document in sorted(documents, key=lambda report: float(report["t"]))}


@dataclass
class Probed(Engine):
    """A vLLM that serves, its log, and the probe's folder."""

    log: Path
    folder: Path

    def reports(self) -> dict[str, Document]:
        """Return the newest of what each process says, by name."""
        return read_reports(self.folder)

    def after(self, name: str, sequence: int) -> Document:
        """Wait for a later report of a process."""
        return eventually(
            lambda: later_report if (later_report := self.reports()[name])["sequence"] > sequence else None,
            f"{name} reports on",
        )

    def serves(self) -> bool:
        return self.complete("w300 w301", 2)["completion_tokens"] == 2

    def said(self) -> list[str]:
        """Return what the probe has said."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if "headroom probe" in line]


@contextmanager
def probed(
    place: Path, *options: str, command_prefix: tuple[str, ...] = (), path: tuple[Path, ...] = (), **environ: str
) -> Iterator[Probed]:
    """Serve until the test has ended; `within` is a command that runs it, `path` what else vLLM finds modules in."""
    install(place / "site")
    (place / "files").mkdir(exist_ok=True)
    port = free_port()
    variables = {"PYTHONPATH": ":".join(map(str, (*path, place / "site"))), "HEADROOM_PROBE_DIR": str(place / "files")}
    with (place / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command_prefix, HERE / "serve.sh", FOLDER, str(port), *options],
            env=os.environ | variables | environ,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    engine = Probed(f"http://127.0.0.1:{port}", process, place / "log", place / "files")
    try:
        eventually(
            lambda: is_answering(f"{engine.url}/health") or process.poll() is not None, "it serves", START_SECONDS
        )
        assert process.poll() is None, engine.log.read_text(errors="replace")[-2000:]
        yield engine
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
