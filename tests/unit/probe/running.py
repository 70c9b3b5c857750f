"""Processes of a fake vLLM with the real probe in them, installed as an operator installs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.process import eventually

INSIDE: Final = Path(__file__).parents[2] / "fakes" / "inside"
SPOILING: Final = INSIDE.parent / "spoiling"
EACH_SECONDS: Final = "0.02"
Document = dict[str, Any]


@dataclass(frozen=True)
class Vllm:
    """A running fake: its first process, its log and the probe's folder."""

    process: subprocess.Popen[bytes]
    log: Path
    folder: Path

    def reports(self) -> list[Document]:
        """Return what is in the folder, by role and name."""
        documents = [json.loads(path.read_text()) for path in self.folder.glob("*-*[0-9].json")]
        return sorted(documents, key=lambda document: (document["role"], document["process_name"]))

    def reports_of(self, *names: str) -> dict[str, Document]:
        """Wait for the processes of these names and return what they know, once vLLM has reported them all."""

        def complete() -> dict[str, Document] | None:
            reports = {report["process_name"]: report for report in self.reports() if report["role"] != "api_server"}
            is_complete = all(value["scheduler"] or value["parts"] for value in reports.values())
            return reports if is_complete and set(names) <= set(reports) else None

        return eventually(complete, f"{', '.join(names)} report; the log says {self.log.read_text()}")

    def serves(self) -> bool:
        return b"serves" in self.log.read_bytes() and self.process.poll() is None


def environment(site: Path, folder: Path | None, **variables: str) -> dict[str, str]:
    """Return vLLM's environment; `folder` None is one in which nobody asked for the probe."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("HEADROOM_")}
    probe_variables = {} if folder is None else {"HEADROOM_PROBE_DIR": str(folder)}
    return own | probe_variables | {"PYTHONPATH": f"{site}:{INSIDE}", "FAKE_INTERVAL_SECONDS": EACH_SECONDS} | variables


@contextmanager
def vllm(
    site: Path,
    folder: Path,
    *arguments: str,
    is_probed: bool = True,
    command_prefix: tuple[str, ...] = (),
    **variables: str,
) -> Iterator[Vllm]:
    """Run the fake, and its processes, until the test has ended; `within` is a command that runs it."""
    log = site.parent / f"log-{folder.name}"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*command_prefix, sys.executable, "-P", "-m", "vllm.serve", *arguments],
            env=environment(site, folder if is_probed else None, **variables),
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    running = Vllm(process=process, log=log, folder=folder)
    try:
        eventually(lambda: running.serves() or process.poll() is not None, "the fake serves")
        yield running
    finally:
        with suppress(ProcessLookupError):  # a test may have killed them all
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
