"""A real Prometheus over blocks that promtool made of a text."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import httpx

from tests.fakes.ports import free_port

INSTALLED: Final = bool(shutil.which("prometheus") and shutil.which("promtool"))
_DEADLINE_SECONDS: Final = 60

Samples = Iterable[tuple[float, float]]


def write_series(lines: dict[str, list[str]], name: str, samples: Samples, labels: Mapping[str, str]) -> None:
    """Add a series to the lines of its family."""
    shown = ",".join(f'{label}="{text}"' for label, text in labels.items())
    lines.setdefault(name, []).extend(f"{name}{{{shown}}} {value!r} {at:.3f}" for at, value in samples)


def write_blocks(folder: Path, lines: Mapping[str, list[str]]) -> Path:
    """Return a TSDB of the families' lines."""
    text, blocks = folder / "history.txt", folder / "data"
    rows = [row for name, family in lines.items() for row in (f"# TYPE {name} unknown", *family)]
    text.write_text("\n".join((*rows, "# EOF", "")))
    subprocess.run(
        ["promtool", "tsdb", "create-blocks-from", "openmetrics", text, blocks], check=True, capture_output=True
    )
    return blocks


@contextlib.contextmanager
def running_prometheus(folder: Path, blocks: Path) -> Iterator[str]:
    """Run Prometheus over the blocks; give its URL."""
    config = folder / "prometheus.yml"
    config.write_text("global: {}\n")
    address = f"127.0.0.1:{free_port()}"
    options = {"config.file": config, "storage.tsdb.path": blocks, "web.listen-address": address}
    command = ["prometheus", *(f"--{name}={value}" for name, value in options.items())]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, "--storage.tsdb.retention.time=10y"], stdout=log, stderr=log)
    try:
        _wait_until_ready(f"http://{address}/-/ready", process, folder / "log")
        yield f"http://{address}"
    finally:
        process.kill()
        process.wait()


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, trust_env=False).is_success:
                return
        time.sleep(0.05)
    raise AssertionError(log.read_text())
