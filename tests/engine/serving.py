"""The real vLLM on the CPU that `make engine-test` sets up, as its tests use it."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import httpx

HERE = Path(__file__).parent
FOLDER = Path(os.environ.get("ENGINE_FOLDER", ".engine")).resolve()


@dataclass
class Engine:
    url: str
    process: subprocess.Popen[bytes]

    def complete(self, prompt: str, tokens: int) -> dict[str, int]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=300)
        answer.raise_for_status()
        usage: dict[str, int] = answer.json()["usage"]
        return usage


def words(first: int, count: int) -> str:
    return " ".join(f"w{300 + (first + step) % 1000}" for step in range(count))


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False
