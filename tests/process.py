"""The real daemon as a process, and its page as values."""

from __future__ import annotations

import os
import re
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

T = TypeVar("T")

DEADLINE_SECONDS = 60.0
"""Far beyond what anything here takes: waiting ends when the condition holds, this only ends a test that failed."""

NO_TLS: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For requests over plain HTTP: without it httpx reads the machine's certificates each time, 20 ms of CPU."""


def eventually(
    condition: Callable[[], T | None],
    description: str,
    deadline_seconds: float = DEADLINE_SECONDS,
    every_seconds: float = 0.02,
) -> T:
    """Return the first true value of `condition`, looked at so often; fail when the deadline passes first."""
    ends = time.monotonic() + deadline_seconds
    while time.monotonic() < ends:
        if value := condition():
            return value
        time.sleep(every_seconds)
    message = f"waited {deadline_seconds:g} s without success: {description}"
    raise AssertionError(message)


def peak_bytes(pid: int) -> int:
    """Return the most memory that a process has ever held."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


class Page:
    """One scrape. Only the lines of what is looked for are read: most are of pages on which it is not yet true."""

    def __init__(self, text: str) -> None:
        self.text = text

    def has(self, name: str, **labels: str) -> bool:
        return bool(self._matching(name, labels))

    def value(self, name: str, **labels: str) -> float:
        """Return the one value of this name among these labels."""
        (value,) = self._matching(name, labels)
        return value

    def names(self, prefix: str) -> set[str]:
        return set(re.findall(rf"^{prefix}\w*", self.text, re.MULTILINE))

    def _matching(self, name: str, labels: Mapping[str, str]) -> list[float]:
        lines = "\n".join(re.findall(rf"^headroom_{name}[ {{].*", self.text, re.MULTILINE)) + "\n"
        samples = [sample for family in text_string_to_metric_families(lines) for sample in family.samples]
        return [sample.value for sample in samples if labels.items() <= sample.labels.items()]


def engine_answers(page: Page) -> bool:
    """Return whether the daemon has read the engine's page."""
    return page.value("source_up", source="engine") == 1


class Daemon:
    """A running vllm-headroom; its log is in a file."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log
        match = eventually(
            lambda: re.search(r"\blistening\b.*\bport=(\d+)", self.log()) or self._ended(), "the daemon listens"
        )
        assert isinstance(match, re.Match), self.log()
        self.url = f"http://127.0.0.1:{match[1]}"
        never_kept = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(base_url=self.url, timeout=10, verify=NO_TLS, limits=never_kept)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self._client.get(path, headers=headers)

    def page(self) -> Page:
        return Page(self.get("/metrics").text)

    def sees(
        self,
        condition: Callable[[Page], object],
        description: str,
        deadline_seconds: float = DEADLINE_SECONDS,
        every_seconds: float = 0.05,
    ) -> Page:
        """Return the first page for which `condition` holds."""

        def look() -> Page | None:
            page = self.page()
            try:
                return page if condition(page) else None
            except ValueError:  # the value is not on this page
                return None

        return eventually(look, description, deadline_seconds, every_seconds)

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, float]:
        """Send a signal; return the exit status and the seconds it took."""
        began = time.monotonic()
        self.process.send_signal(number)
        status = self.process.wait(30)
        return status, time.monotonic() - began

    def _ended(self) -> bool:
        return self.process.poll() is not None


IN_FULL = frozenset(
    {
        "ACCOUNT",
        "BEGAN",
        "CLOCK_APART",
        "KUBERNETES_SERVICE_HOST",
        "KUBERNETES_SERVICE_PORT",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "MALLOC_ARENA_MAX",
        "NODE_TREE",
        "NVML_FAKE_FILE",
        "POD_NAME",
        "POD_NAMESPACE",
        "PYTHONPATH",
        "SPEED",
        "STEPPED",
        "STUCK",
        "RAISING",
        "STUCK_BY",
        "WITHOUT",
    }
)


@contextmanager
def hangups_heard() -> Iterator[None]:
    """Have what is started meanwhile hear SIGHUP, also where these tests run under nohup, which it would inherit."""
    previous_handler = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, previous_handler)


def launch(
    log: Path, *arguments: str, module: str = "vllm_headroom", under: Sequence[str] = (), **environment: str
) -> subprocess.Popen[bytes]:
    """Start what `daemon` runs, with its output in the file `log`."""
    settings = {
        name if name in IN_FULL else f"HEADROOM_{name}": value
        for name, value in {"LISTEN_HOST": "127.0.0.1", "LISTEN_PORT": "0", **environment}.items()
    }
    with log.open("ab") as stream, hangups_heard():
        return subprocess.Popen(
            [*under, sys.executable, "-m", module, *arguments],
            env={**os.environ, **settings},
            stdout=stream,
            stderr=subprocess.STDOUT,
        )


@contextmanager
def daemon(
    *arguments: str, module: str = "vllm_headroom", under: Sequence[str] = (), **environment: str
) -> Iterator[Daemon]:
    """Run the daemon on a free port; `environment` holds settings without their prefix, and other variables in full.

    `module` is what is run, the program itself or a test's way of starting it; `under` a command that runs it.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        process = launch(log, *arguments, module=module, under=under, **environment)
        try:
            yield Daemon(process, log)
        finally:
            process.kill()
            process.wait(30)
