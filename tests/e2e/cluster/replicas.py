"""A Service of replicas that leak, each with its sidecar and its kubelet, under load, on a clock that runs faster."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import httpx

from tests.e2e.cluster.kubelet import Container, Scripts
from tests.fakes.nvml.library import GIB, MIB, FakeGpu, FakeNvml
from tests.process import NO_TLS, daemon, eventually

SERVER: Final = Path(__file__).parents[2] / "fakes" / "leaking_server.py"
SPEED: Final = 80.0
SAMPLES: Final = {"SAMPLE_INTERVAL_SECONDS": "30", "GPU_SAMPLE_INTERVAL_SECONDS": "30"}
"""At this speed two or three a second."""

REPLICAS: Final = 3
LOADS_SECONDS: Final = 60.0
REQUEST_SECONDS: Final = 120.0
BETWEEN_SECONDS: Final = 6.0
"""From one request to the next, of all replicas: each has seven at a time, and 200 in an hour."""

WEIGHTS_BYTES: Final = 60 * GIB
ROOM_BYTES: Final = 12 * GIB
LEAK_BYTES: Final = 36 * MIB
"""For each request: the room lasts 100 minutes, and less by what a replica has leaked when it begins."""

LEAKED_BYTES: Final = GIB // 2

BEGAN: Final = time.time()
"""By which all clocks show the same time, as those of a cluster do."""


def now() -> float:
    """Return the seconds of the clock that runs faster."""
    return time.monotonic() * SPEED


class Engine:
    """What leaks, and the GPU that it holds; the first life of each has leaked for another time."""

    def __init__(self, folder: Path, number: int) -> None:
        folder.mkdir(parents=True)
        self._held = folder / "held"
        self._leaked_bytes = number * LEAKED_BYTES
        self._nvml = FakeNvml(folder, [FakeGpu(uuid="GPU-a", total_bytes=WEIGHTS_BYTES + ROOM_BYTES, reserved_bytes=0)])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = int(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{port}"
        self.settings = {"ENGINE_URL": self.url, "GPUS": "0", "GATE_NAME": f"vllm-{number}", "SPEED": f"{SPEED:g}"}
        self.settings["BEGAN"] = str(BEGAN)
        self.settings |= {**SAMPLES, **self._nvml.environment()}
        program = folder / "server"  # by the name of vllm it would be an engine to other tests, which look into /proc
        program.write_text(SERVER.read_text())
        times = (LOADS_SECONDS / SPEED, REQUEST_SECONDS / SPEED)
        self._command = (program, "serve", "m", "--port", port, self._held, *times)

    def start(self) -> subprocess.Popen[bytes]:
        """Begin a life."""
        held_bytes, self._leaked_bytes = WEIGHTS_BYTES + self._leaked_bytes, 0
        command = (*self._command, held_bytes, LEAK_BYTES, WEIGHTS_BYTES + ROOM_BYTES)
        return subprocess.Popen([sys.executable, *map(str, command)])

    def watch(self, process: subprocess.Popen[bytes]) -> None:
        """Let the GPU show what the process holds now."""
        lives = process.poll() is None and self._held.exists()
        used_bytes, gpu = int(self._held.read_text()) if lives else 0, self._nvml.gpus[0]
        if used_bytes != gpu.used_bytes:
            gpu.used_bytes, gpu.processes = used_bytes, {process.pid: used_bytes} if used_bytes else {}
            self._nvml.write()


class Service:
    """Sends each request to one of the pods that are ready, and counts what became of it, as `answer` says."""

    def __init__(self, pods: list[tuple[str, Container]], answer: Callable[[str], str]) -> None:
        self.pods = pods
        self.became: Counter[str] = Counter()
        self._answer = answer
        self._random = random.Random(1)  # noqa: S311 - a choice, no secret

    @property
    def lost(self) -> int:
        """How many requests were not answered."""
        return self.became.total() - self.became["served"]

    @property
    def deaths(self) -> int:
        """How many lives ended by themselves."""
        return sum(container.deaths for _, container in self.pods)

    @property
    def restarts(self) -> int:
        """How many lives the kubelet ended."""
        return sum(container.restarts for _, container in self.pods)

    def request(self) -> None:
        """Send one, and wait for what becomes of it."""
        ready = [url for url, container in self.pods if container.ready]
        self.became[self._answer(self._random.choice(ready)) if ready else "nobody ready"] += 1


def answer(url: str) -> str:
    """Ask a fake engine; return what became of it."""
    try:
        httpx.post(f"{url}/v1/completions", verify=NO_TLS, timeout=60).raise_for_status()
    except httpx.ConnectError:
        return "refused"
    except httpx.TransportError:
        return "broken off"
    return "served"


@contextmanager
def services(folder: Path, worlds: Mapping[str, Mapping[str, str]]) -> Iterator[dict[str, Service]]:
    """Run a Service for each of these settings of the gates, side by side, until every pod of all is ready."""
    with ExitStack() as stack:

        def pod(place: Path, number: int, gates: Mapping[str, str]) -> tuple[str, Container]:
            engine = Engine(place, number)
            sidecar = stack.enter_context(daemon(module="tests.e2e.hurried", **engine.settings, **gates))
            container = Container(engine.start, engine.watch, Scripts(engine.url, sidecar.url, SPEED), now)
            stack.callback(container.close)
            return engine.url, container

        made = {
            name: Service(
                [pod(folder / f"{place}-{number}", number, gates) for number in range(1, REPLICAS + 1)], answer
            )
            for place, (name, gates) in enumerate(worlds.items())
        }
        pods = [container for service in made.values() for _, container in service.pods]
        eventually(lambda: all(each.ready for each in pods), "all pods are ready")
        yield made


def load(services: Iterable[Service], count: int, between_seconds: float = BETWEEN_SECONDS / SPEED) -> None:
    """Send so many requests to each, at the same moments; return when all are over."""
    sent = list[threading.Thread]()
    for _ in range(count):
        for service in services:
            sent.append(threading.Thread(target=service.request))
            sent[-1].start()
        time.sleep(between_seconds)
    for each in sent:
        each.join()
