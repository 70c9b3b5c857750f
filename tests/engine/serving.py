"""The real vLLM on the CPU that `make engine-test` sets up, as its tests use it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.process import NO_TLS, eventually

HERE = Path(__file__).parent
FOLDER = Path(os.environ.get("ENGINE_FOLDER", ".engine")).resolve()
START_SECONDS = 900.0


@dataclass
class Engine:
    url: str
    process: subprocess.Popen[bytes]

    def complete(self, prompt: str, tokens: int) -> dict[str, int]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=300, verify=NO_TLS)
        answer.raise_for_status()
        usage: dict[str, int] = answer.json()["usage"]
        return usage


@contextmanager
def serving(port: int, log: Path, *options: str, **environment: str) -> Iterator[Engine]:
    """Run vLLM, which may still load its model; at the end all its processes are killed."""
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [HERE / "serve.sh", FOLDER, str(port), *options],
            env={**os.environ, **environment},
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield Engine(url=f"http://127.0.0.1:{port}", process=process)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def words(first_word: int, count: int) -> str:
    return " ".join(f"w{300 + (first_word + step) % 1000}" for step in range(count))


def is_answering(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, verify=NO_TLS).status_code == 200
    except httpx.TransportError:
        return False


def started(engine: Engine) -> Engine:
    """Wait until vLLM answers: a minute, ten on a machine that has other work. To ask it often would make it longer."""
    eventually(lambda: is_answering(f"{engine.url}/metrics"), "vLLM answers", START_SECONDS, every_seconds=2)
    return engine
