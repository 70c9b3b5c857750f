"""What the daemon of the soak reads, and each fault of it: begun on entry, over on exit."""

from __future__ import annotations

import contextlib
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.e2e.hurried import READER_PARTS
from tests.fakes.engine_server import Answer, EngineServer, cut, drip, hang, page, reset, with_head
from tests.fakes.nvml.library import FakeNvml
from tests.process import Daemon
from vllm_headroom.vocabulary import Source

MIB: Final = 2**20


@dataclass
class World:
    """What the daemon reads, and what is wrong with it now."""

    folder: Path
    engine: EngineServer
    nvml: FakeNvml
    speed: float
    dice: random.Random
    restarted: float = field(default_factory=time.monotonic)
    running: Daemon | None = None
    clients: list[socket.socket] = field(default_factory=list)
    raising: Source | None = None
    """The source whose reader raises now, or did last."""

    def text(self) -> str:
        """Return the engine's page: steady load since its start."""
        seconds = (time.monotonic() - self.restarted) * self.speed
        labels = 'engine="0",model_name="m"'
        return (
            f"process_start_time_seconds {1_760_000_000 + round(self.restarted * self.speed)}\n"
            f"vllm:num_requests_running{{{labels}}} {20 + self.dice.randint(-2, 2)}.0\n"
            f"vllm:num_requests_waiting{{{labels}}} 0.0\n"
            f"vllm:kv_cache_usage_perc{{{labels}}} {self.dice.uniform(0.4, 0.6)}\n"
            f'vllm:request_success_total{{finished_reason="stop",{labels}}} {int(seconds * 2)}.0\n'
            f"vllm:generation_tokens_total{{{labels}}} {int(seconds * 400)}.0\n"
        )

    def serve(self) -> None:
        """Have the engine answer as it should."""

        def answer(connection: socket.socket, closing: threading.Event) -> None:
            page(self.text())(connection, closing)

        self.engine.answer = answer

    @property
    def pid(self) -> int:
        assert self.running is not None
        return self.running.process.pid


@contextlib.contextmanager
def engine_fault(world: World) -> Iterator[None]:
    """Have the engine's page fail in one of its ways."""
    head = with_head(world.text().encode())
    answers: list[Answer] = [
        page("busy", status="503 Service Unavailable"),
        page("<html>not it</html>"),
        page(""),
        page("x" * (5 * MIB)),
        cut(head[:-20]),
        drip(world.text()),
        hang,
        reset,
    ]
    world.engine.answer = world.dice.choice(answers)
    yield
    world.serve()


@contextlib.contextmanager
def engine_restart(world: World) -> Iterator[None]:
    """Have the engine refuse for a while, and count from zero afterwards."""
    world.engine.answer = reset
    yield
    world.restarted = time.monotonic()
    world.serve()


@contextlib.contextmanager
def nvml_fault(world: World) -> Iterator[None]:
    """Have the driver fail, for all GPUs or as a whole; 15 is a lost GPU, 9 a driver that is not loaded."""
    gpu = world.nvml.gpus[0]
    broken: dict[str, Callable[[], None]] = {
        "lost": lambda: gpu.errors.update({"all": 15}),
        "gone": lambda: world.nvml.errors.update({"all": 9}),
        "slow": lambda: gpu.hangs.update({"all": 1.0}),
    }
    broken[world.dice.choice([*broken])]()
    world.nvml.write()
    yield
    for faults in (gpu.errors, gpu.hangs, world.nvml.errors, world.nvml.hangs):
        faults.clear()
    world.nvml.write()


@contextlib.contextmanager
def probe_fault(world: World) -> Iterator[None]:
    """Have the probe's folder hold what is none of its files, or not be there."""
    probe = world.folder / "probe"
    if world.dice.random() < 0.3:
        probe.rename(world.folder / "away")
        yield
        (world.folder / "away").rename(probe)
        return
    for number in range(world.dice.randint(1, 50)):
        (probe / f"{number}.json").write_bytes(world.dice.randbytes(world.dice.randint(0, 4096)))
    yield
    for path in probe.iterdir():
        path.unlink()


@contextlib.contextmanager
def disk_full(world: World) -> Iterator[None]:
    """Have the kernel refuse to make any file of the daemon's larger than it may be now."""
    _, hard_limit = resource.prlimit(world.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(world.pid, resource.RLIMIT_FSIZE, (world.dice.randint(0, 4096), hard_limit))
    yield
    resource.prlimit(world.pid, resource.RLIMIT_FSIZE, (hard_limit, hard_limit))


@contextlib.contextmanager
def disk_stuck(world: World) -> Iterator[None]:
    """Have every open of a file on the volume wait."""
    flag = world.folder / "volume.stuck"
    flag.touch()
    yield
    flag.unlink()


@contextlib.contextmanager
def network_fault(world: World) -> Iterator[None]:
    """Have strangers hold connections: silent, half a request, garbage, or an answer that is never read."""
    port = int(str(world.running and world.running.url).rpartition(":")[2])
    words = (
        b"",
        b"GET /metrics HTTP/1.1\r\nHo",
        world.dice.randbytes(200),
        b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * 50,
    )
    for _ in range(world.dice.randint(1, 60)):
        with contextlib.suppress(OSError):
            client = socket.create_connection(("127.0.0.1", port), timeout=1)
            world.clients.append(client)
            client.send(world.dice.choice(words))
    yield
    while world.clients:
        world.clients.pop().close()


@contextlib.contextmanager
def reader_raises(world: World) -> Iterator[None]:
    """Have the reader of one source raise errors that nobody expects."""
    world.raising = world.dice.choice([*READER_PARTS])
    file = world.folder / "raising"
    new_file = world.folder / "raising.new"
    new_file.write_text(world.raising)
    new_file.rename(file)
    yield
    file.unlink()


@contextlib.contextmanager
def stall(world: World) -> Iterator[None]:
    """Have the daemon itself stand still for a second, as on a node without CPU."""
    world.running.process.send_signal(signal.SIGSTOP)  # type: ignore[union-attr]
    time.sleep(1)
    world.running.process.send_signal(signal.SIGCONT)  # type: ignore[union-attr]
    yield


FAULTS: Final = {
    "engine": engine_fault,
    "restart": engine_restart,
    "nvml": nvml_fault,
    "probe": probe_fault,
    "disk full": disk_full,
    "disk stuck": disk_stuck,
    "network": network_fault,
    "reader raises": reader_raises,
    "stall": stall,
}
SHUTS_OUT: Final = {
    "engine": {"restart"},
    "restart": {"engine"},
    "disk full": {"disk stuck"},
    "disk stuck": {"disk full"},
}
"""Of the same thing there is one fault at a time."""
