"""Exporters side by side: ours as it is installed, a peer, and the naive one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from zlib import crc32

import httpx

from tests.bench.processes import ROOT, cpu_seconds, resident_bytes
from tests.fakes.engine_server import LOOPBACK
from tests.fakes.nvml.library import FakeNvml
from tests.process import eventually

PEER: Final = "nvitop-exporter==1.7.2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exporter:
    """A running exporter."""

    url: str
    pid: int

    def scrape(self) -> str:
        return httpx.get(self.url, timeout=30).raise_for_status().text

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.pid)

    def resident_bytes(self) -> int:
        return resident_bytes(self.pid)


def environment(name: str, *install: str) -> Path | None:
    """Return the folder of commands of a virtual environment made once; None where nothing can be installed."""
    home = ROOT / ".cache" / "bench" / name
    done = home / "done"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for words in install:
            if subprocess.run([*pip, *words.split()], cwd=ROOT, check=False).returncode:
                return None
        done.touch()
    return home / "bin"


def runtime() -> Path | None:
    """Return ours with what `requirements/runtime.txt` locks, and nothing beside it."""
    locked = crc32((ROOT / "requirements" / "runtime.txt").read_bytes())
    return environment(f"runtime-{locked:08x}", "-r requirements/runtime.txt", "--no-deps -e .")


@contextmanager
def ours(python: Path, engine_url: str, nvml: FakeNvml, **settings: str) -> Iterator[Exporter]:
    port = find_free_port()
    all_settings = {
        "ENGINE_URL": engine_url,
        "LISTEN_HOST": LOOPBACK,
        "LISTEN_PORT": str(port),
        "GPUS": "all",
        **settings,
    }
    variables = {f"HEADROOM_{name}": value for name, value in all_settings.items()}
    command = [str(python / "vllm-headroom"), "run"]
    with _running(command, port, nvml, "headroom_engine_requests_running", **variables) as exporter:
        yield exporter


@contextmanager
def ours_on_node(python: Path, nvml: FakeNvml, **settings: str) -> Iterator[Exporter]:
    """Watch every engine of the machine."""
    port = find_free_port()
    all_settings = {"ENGINES": "node", "LISTEN_HOST": LOOPBACK, "LISTEN_PORT": str(port), **settings}
    variables = {f"HEADROOM_{name}": value for name, value in all_settings.items()}
    with _running([str(python / "vllm-headroom"), "run"], port, nvml, "headroom_engines", **variables) as exporter:
        yield exporter


@contextmanager
def peer(python: Path, nvml: FakeNvml, last_gpu: int) -> Iterator[Exporter]:
    port = find_free_port()
    command = [str(python / "nvitop-exporter"), "--bind-address", LOOPBACK, "--port", str(port), "--interval", "1"]
    with _running(command, port, nvml, f'index="{last_gpu}"') as exporter:
        yield exporter


@contextmanager
def naive(python: Path, engine_url: str, nvml: FakeNvml) -> Iterator[Exporter]:
    port = find_free_port()
    command = [str(python / "python"), str(Path(__file__).with_name("naive.py")), engine_url, str(port)]
    with _running(command, port, nvml, "naive_vllm_num_requests_running") as exporter:
        yield exporter


@contextmanager
def _running(command: list[str], port: int, nvml: FakeNvml, shows: str, **variables: str) -> Iterator[Exporter]:
    compiled = {"PYTHONDONTWRITEBYTECODE": ""}  # ours is installed as sources, which the first start compiles
    process = subprocess.Popen(
        command,
        env={**os.environ, **nvml.environment(), **compiled, **variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    exporter = Exporter(url=f"http://{LOOPBACK}:{port}/metrics", pid=process.pid)
    try:
        eventually(lambda: _shows(exporter, shows), f"{command[0]} shows {shows}")
        yield exporter
    finally:
        process.kill()
        process.wait(30)


def _shows(exporter: Exporter, text: str) -> bool:
    try:
        return text in exporter.scrape()
    except httpx.TransportError:
        return False


def find_free_port() -> int:
    """Return a port at which nothing listens."""
    with socket.create_server((LOOPBACK, 0)) as free:
        port: int = free.getsockname()[1]
    return port
