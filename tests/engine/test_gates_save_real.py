"""Real vLLMs leak in cgroups until the kernel kills them, without the gates, with one and with both: requests lost.

Each has its sidecar, on a clock that runs faster, and its kubelet; two replicas are a Service. Takes 25 minutes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Final

import httpx
import pytest

from tests.bench.test_gates_save import WORLDS
from tests.e2e.cluster.kubelet import Container, Scripts
from tests.e2e.cluster.replicas import Service, load
from tests.engine.serving import FOLDER, HERE, START_SECONDS
from tests.fakes.cgroups import leave, limited
from tests.fakes.ports import free_port
from tests.process import NO_TLS, daemon, eventually

pytestmark = pytest.mark.engine

SPEED: Final = 8.0
"""Not more: a vLLM that starts within 100 seconds takes 13 minutes of this clock, as a large model may."""

TURN: Final = {"GATE_READY_MOST_SECONDS": "1800"}
"""Half a turn is time for one to end and to start while the other stays."""

BEGAN: Final = time.time()
BYTES_PER_SECOND: Final = 1_000_000
LIVES_SECONDS: Final = {1: 1000, 2: 900}
"""Of the machine, by replica: two hours of this clock, for `/gate/live` does not fail within its first."""

REQUESTS, BETWEEN_SECONDS, TOKENS = 290, 4.0, 120
"""In 19 minutes, in which each replica dies once. A request takes some 2 s."""

cores = cycle(range(os.cpu_count() or 1))


class Group(subprocess.Popen[bytes]):
    """A process that is killed with all that it has begun."""

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What leaks in `cgroup`; its log and its plugin's are in `folder`."""

    folder: Path
    cgroup: Path
    port: int
    core: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Group:
        """Begin a life."""
        within = ("sh", "-c", f'echo $$ >{self.cgroup}/cgroup.procs && exec "$@"', "sh")
        leak = {
            "PYTHONPATH": str(HERE / "leaking_plugin"),
            "LEAKED": str(self.folder),
            "LEAKS": "engine_core=time",
            "LEAKED_BYTES_PER_SECOND": str(BYTES_PER_SECOND),
            "ENGINE_CORE": str(self.core),
        }
        options = ("--num-gpu-blocks-override", "512", "--disable-uvicorn-access-log")
        with (self.folder / "serve.log").open("ab") as log:
            return Group(
                [*within, HERE / "serve.sh", FOLDER, str(self.port), *options],
                env=os.environ | leak,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kills(self) -> int:
        """Return how often the kernel has killed it."""
        return int((self.cgroup / "memory.oom_control").read_text().rpartition("oom_kill ")[2])


def answer(url: str) -> str:
    """Ask for tokens; an answer with fewer is none."""
    body = {"model": "tiny", "prompt": "w300 w301", "max_tokens": TOKENS, "ignore_eos": True}
    try:
        told = httpx.post(f"{url}/v1/completions", json=body, timeout=300, verify=NO_TLS).raise_for_status().json()
    except httpx.ConnectError:
        return "refused"
    except httpx.HTTPStatusError as error:
        return f"answered {error.response.status_code}"
    except httpx.TransportError:
        return "broken off"
    return "served" if told["usage"]["completion_tokens"] == TOKENS else "cut off"


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A Service and its engines."""

    service: Service
    engines: tuple[Engine, ...]

    @property
    def kills(self) -> int:
        return sum(engine.kills() for engine in self.engines)

    def __str__(self) -> str:
        told = ", ".join(f"{count} {word}" for word, count in sorted(self.service.became.items()))
        return f"{told}; {self.kills} killed by the kernel, {self.service.restarts} ended by the kubelet"


def world(stack: ExitStack, folder: Path, gates: Mapping[str, str]) -> World:
    """Begin the pods of one Service."""
    engines, pods = [], []
    for number in LIVES_SECONDS:
        place = folder / str(number)
        place.mkdir(parents=True)
        cgroup = stack.enter_context(limited(2**36, f"-{folder.name}-{number}"))
        if not (cgroup / "memory.oom_control").exists():
            pytest.skip("this machine's cgroups are of version 2; their tree is read in tests/unit/scrape/proc")
        engine = Engine(folder=place, cgroup=cgroup, port=free_port(), core=next(cores))
        settings = {"ENGINE_URL": engine.url, "GATE_NAME": f"vllm-{number}", "SAMPLE_INTERVAL_SECONDS": "30"}
        clock = {"SPEED": f"{SPEED:g}", "BEGAN": str(BEGAN)}
        sidecar = stack.enter_context(daemon(module="tests.e2e.hurried", **settings, **clock, **TURN, **gates))
        scripts = Scripts(engine.url, sidecar.url, SPEED)
        container = Container(engine.start, lambda _: None, scripts, lambda: time.monotonic() * SPEED)
        stack.callback(container.close)
        engines.append(engine)
        pods.append((engine.url, container))
    return World(service=Service(pods, answer), engines=tuple(engines))


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, World]]:
    top = tmp_path_factory.mktemp("worlds")
    with ExitStack() as stack:
        made = {name: world(stack, top / str(place), gates) for place, (name, gates) in enumerate(WORLDS.items())}
        pods = [container for each in made.values() for _, container in each.service.pods]
        eventually(lambda: all(each.ready for each in pods), "all pods are ready", START_SECONDS, 1.0)
        for each in made.values():
            for engine, seconds in zip(each.engines, LIVES_SECONDS.values(), strict=True):
                leave(engine.cgroup, seconds * BYTES_PER_SECOND)
        load([each.service for each in made.values()], REQUESTS, BETWEEN_SECONDS)
        for name, each in made.items():
            print(f"{name}: {each}")  # noqa: T201 - the figures of docs/gates.md
        yield made


def test_without_a_gate_the_kernel_kills_and_requests_are_lost(worlds: dict[str, World]) -> None:
    assert worlds["no gate"].kills >= 2
    assert worlds["no gate"].service.lost >= 1


def test_the_ready_gate_alone_mends_no_leak(worlds: dict[str, World]) -> None:
    assert worlds["`/gate/ready`"].kills >= 2


def test_with_both_the_kubelet_ends_them_before_the_kernel_does(worlds: dict[str, World]) -> None:
    assert worlds["both"].kills == 0
    assert worlds["both"].service.restarts >= 2
    assert worlds["both"].service.lost <= worlds["no gate"].service.lost
