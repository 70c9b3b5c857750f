"""Record the memory of a real vLLM's processes under the loads of a plan.

    ENGINE_FOLDER=.engine python -m tests.engine.record_real FOLDER level=40 bursty=20 idle=10 restart adapters=20

Minutes stand behind each load. FOLDER gets the daemon's trace, the plan, and what the leaking plugin kept where LEAKS
names processes that are to leak (`engine_core=requests worker=lumps`). `thin_real` makes an asset of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx

from tests.engine.loads import LOADS
from tests.engine.serving import FOLDER, HERE, serving, started
from tests.fakes.ports import free_port
from tests.process import daemon

PYTHON: Final = FOLDER / "venv/bin/python"
FEW_BLOCKS: Final = ("--num-gpu-blocks-override", "512")
ADAPTERS: Final = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--max-cpu-loras", "4")
RESTART: Final = "restart"


def planned(words: list[str]) -> list[tuple[str, float]]:
    """Return the loads and their seconds, in turn."""
    pairs = (word.partition("=") for word in words)
    return [(load, 60 * float(minutes or 0)) for load, _, minutes in pairs]


def environment(folder: Path) -> dict[str, str]:
    """Return what lets vLLM take adapters while it runs, and leak as LEAKS says."""
    return {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "PYTHONPATH": str(HERE / "leaking_plugin"),
        "LEAKED": str(folder),
    }


@contextmanager
def served(folder: Path, port: int, options: tuple[str, ...]) -> Iterator[str]:
    with serving(port, folder / "serve.log", *options, "--disable-uvicorn-access-log", **environment(folder)) as engine:
        yield started(engine).url


async def play(url: str, loads: list[tuple[str, float]]) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        for load, seconds in loads:
            await LOADS[load](client, seconds)


def lives(plan: list[tuple[str, float]]) -> Iterator[list[tuple[str, float]]]:
    """Yield the loads of each run of the server."""
    life: list[tuple[str, float]] = []
    for load, seconds in plan:
        if load == RESTART:
            yield life
            life = []
        else:
            life.append((load, seconds))
    yield life


def options(plan: list[tuple[str, float]]) -> tuple[str, ...]:
    """Return what the server is started with; adapters are written for a plan that has some."""
    if all(load != "adapters" for load, _ in plan):
        return FEW_BLOCKS
    subprocess.run([PYTHON, HERE / "lora_adapters.py", FOLDER / "adapters"], check=True)
    return FEW_BLOCKS + ADAPTERS


def record(folder: Path, loads: list[str]) -> None:
    folder.mkdir(parents=True)
    describe(folder, loads)
    plan = planned(loads)
    port, started_with = free_port(), options(plan)
    with daemon(ENGINE_URL=f"http://127.0.0.1:{port}", TRACE_FILE=str(folder / "trace.jsonl")):
        for life in lives(plan):
            with served(folder, port, started_with) as url:
                asyncio.run(play(url, life))


def describe(folder: Path, loads: list[str]) -> None:
    """Write down what is recorded."""
    command = (PYTHON, "-c", "import importlib.metadata as found; print(found.version('vllm'))")
    release = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    plan = {"release": release, "loads": loads, "leaks": os.environ.get("LEAKS", "")}
    (folder / "plan.json").write_text(json.dumps(plan))


if __name__ == "__main__":
    record(Path(sys.argv[1]).resolve(), sys.argv[2:])
