"""Play days of a daemon that watches a node, on a faster clock, while engines of pods come and go.

Checked at every look: no series has the names of another engine than its own. At the end: memory, descriptors, threads,
series, the log and the folders of state are bounded, and the page has exactly the engines that are there.

    python tests/soak/node.py --days 1 --speed 120 --seed 1
"""

from __future__ import annotations

import argparse
import random
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.engine_server import EngineServer, hang, page, reset
from tests.fakes.node_tree import NodeTree
from tests.fakes.nvml.library import GIB, FakeGpu, FakeNvml
from tests.fakes.proc_tree import BOOT_SECONDS, TICKS
from tests.process import Daemon, daemon, eventually
from vllm_headroom.daemon.state.folders import MOST_RECENT

MIB: Final = 2**20
ENGINES: Final = 6
SAMPLE_SECONDS: Final = 30
LOOK_SECONDS: Final = 0.25
"""Of the machine's time, from one look to the next."""

CHANGE_PROBABILITY: Final = 0.3
"""Of a change of one engine at a look: about one in two minutes of the daemon's time at the usual speed."""

USUAL_SPEED: Final = 120.0
SETTLE_SECONDS: Final = 60.0
LIMITS: Final = {
    "rss_mib": 160,
    "growth_mib": 8,
    "fds": 320,
    "threads": 96,
    "series": 6000,
    "folders": MOST_RECENT + 2 * ENGINES,
    "log_kib_per_change": 16,
}


@dataclass
class Engine:
    """An engine in a pod, on the GPU of its number."""

    gpu: int
    server: EngineServer
    pod: str = ""
    uid_number: int = 0
    pid: int = 0
    restarts: int = 0

    def render(self, started_seconds: float) -> str:
        """Return its page, whose model has the name of the pod."""
        labels = f'engine="0",model_name="{self.pod}"'
        finished = int(1000 * (time.monotonic() - started_seconds))
        return (
            f"process_start_time_seconds {BOOT_SECONDS + self.pid}\n"
            f"vllm:num_requests_running{{{labels}}} 3.0\n"
            f"vllm:num_requests_waiting{{{labels}}} 0.0\n"
            f"vllm:kv_cache_usage_perc{{{labels}}} 0.5\n"
            f'vllm:request_success_total{{finished_reason="stop",{labels}}} {finished}.0\n'
            f"vllm:generation_tokens_total{{{labels}}} {100 * finished}.0\n"
        )


@dataclass
class Node:
    """The pods, processes and GPUs of the node."""

    tree: NodeTree
    nvml: FakeNvml
    engines: list[Engine]
    unused_servers: deque[EngineServer]
    """The servers of no pod, the one that has been unused for longest first: no address is used again at once."""
    next_pid: int = 1000
    next_uid_number: int = 1
    changes: dict[str, int] = field(default_factory=dict)
    owners: dict[str, set[str]] = field(default_factory=dict)
    """The names of all pods that each GPU has had, by its UUID."""

    def create(self, engine: Engine) -> None:
        """Replace the engine's pod by a new one."""
        if engine.pid:
            self.stop(engine)
            self.tree.remove(engine.pid - 1)
            self.unused_servers.append(engine.server)
            engine.server = self.unused_servers.popleft()
        engine.uid_number = self.next_uid_number
        engine.pod = f"llama-{self.next_uid_number}"
        self.next_uid_number += 1
        self.next_pid += 2
        # The pod's first process runs as long as the pod exists.
        self.add(engine, self.next_pid - 1, "/pause", listening=False)
        self.start(engine, self.next_pid)

    def start(self, engine: Engine, pid: int) -> None:
        """Start the engine's server and core in its pod."""
        engine.pid = pid
        self.add(engine, pid, "python3", "/usr/bin/vllm", "serve", engine.pod, "--port", str(engine.server.port))
        gpu = self.nvml.gpus[engine.gpu]
        gpu.used_bytes = 60 * GIB
        gpu.processes = {pid: 59 * GIB}
        self.nvml.write()
        self.owners.setdefault(gpu.uuid, set()).add(engine.pod)
        began_seconds = time.monotonic()

        def answer(connection: socket.socket, closing: threading.Event) -> None:
            page(engine.render(began_seconds))(connection, closing)

        engine.server.answer = answer

    def add(self, engine: Engine, pid: int, *command: str, listening: bool = True) -> None:
        """Write a process of the engine's pod."""
        self.tree.add_pod(
            engine.uid_number,
            pid,
            *command,
            name=engine.pod,
            address=f"10.244.1.{engine.gpu + 2}",
            listening=[("0.0.0.0", engine.server.port)] if listening else [],
        )
        self.tree.add(pid, 1, *command, started_ticks=int((time.time() - BOOT_SECONDS) * TICKS))

    def stop(self, engine: Engine) -> None:
        """End the engine's server, which gives the memory of its GPU back."""
        with suppress(FileNotFoundError):
            self.tree.remove(engine.pid)
        gpu = self.nvml.gpus[engine.gpu]
        gpu.used_bytes = GIB
        gpu.processes = {}
        self.nvml.write()
        engine.server.answer = reset

    def is_running(self, engine: Engine) -> bool:
        return (self.tree.path / str(engine.pid)).exists()

    def change(self, dice: random.Random) -> None:
        """Change one engine: a new pod, a restart, a crash, a hang, or its end."""
        engine = dice.choice(self.engines)
        kind = dice.choice(("replace", "replace", "restart", "crash", "hang"))
        if not self.is_running(engine):
            kind = "start"
        self.changes[kind] = self.changes.get(kind, 0) + 1
        if kind == "replace":
            self.create(engine)
        elif kind == "crash":
            self.stop(engine)
        elif kind == "hang":
            engine.server.answer = hang
        else:
            self.stop(engine)
            self.next_pid += 2
            self.move_pause(engine)
            self.start(engine, self.next_pid)

    def move_pause(self, engine: Engine) -> None:
        """Give the pod's first process the pid before that of the next server."""
        self.tree.remove(engine.pid - 1)
        self.add(engine, self.next_pid - 1, "/pause", listening=False)

    def settle(self) -> None:
        """Have every engine serve."""
        for engine in self.engines:
            self.stop(engine)
            self.next_pid += 2
            self.move_pause(engine)
            self.start(engine, self.next_pid)


@dataclass
class Figures:
    """What was measured at each look, and what was wrong."""

    rss: list[int] = field(default_factory=list)
    fds: int = 0
    threads: int = 0
    series: int = 0
    folders: int = 0
    looks: int = 0
    wrong: set[str] = field(default_factory=set)

    def measure(self, pid: int, state: Path) -> None:
        """Add one look at the process and its folders."""
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        self.rss.append(int(status["VmRSS"].split()[0]) * 1024)
        self.threads = max(self.threads, int(status["Threads"]))
        self.fds = max(self.fds, len([*Path(f"/proc/{pid}/fd").iterdir()]))
        self.folders = max(self.folders, len([*state.glob("engine-*")]))

    def judge(self, text: str, node: Node) -> None:
        """Note every series that has the names of another engine than its own."""
        series = 0
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                series += 1
                pod = sample.labels.get("pod")
                if pod is None:
                    continue
                if sample.labels.get("model_name", pod) != pod:
                    self.wrong.add(f"{sample.name} of model {sample.labels['model_name']} has pod {pod}")
                gpu = sample.labels.get("uuid")
                if gpu and pod not in node.owners[gpu]:
                    self.wrong.add(f"{sample.name} of {gpu} has pod {pod}, whose it never was")
        self.series = max(self.series, series)
        self.looks += 1


def list_pods(running: Daemon) -> set[str]:
    """Return the pods of the engines on the page."""
    return {
        sample.labels["pod"]
        for family in text_string_to_metric_families(running.get("/metrics").text)
        for sample in family.samples
        if sample.name == "headroom_engine_state"
    }


def report(figures: Figures, node: Node, *, hours: float, log: str, status: int) -> list[str]:
    """Print the figures; return what is not as it has to be."""
    changes = sum(node.changes.values())
    quarter = max(1, len(figures.rss) // 4)
    values = {
        "rss_mib": max(figures.rss) / MIB,
        "growth_mib": (max(figures.rss[-quarter:]) - max(figures.rss[quarter : 2 * quarter])) / MIB,
        "fds": figures.fds,
        "threads": figures.threads,
        "series": figures.series,
        "folders": figures.folders,
        "log_kib_per_change": len(log) / 1024 / max(1, changes),
    }
    counts = ", ".join(f"{name} {count}" for name, count in sorted(node.changes.items()))
    print(f"{hours:.1f} hours of the daemon, {figures.looks} pages, exit {status}; {changes} changes: {counts}")
    print(", ".join(f"{name} {value:.1f} (at most {LIMITS[name]})" for name, value in values.items()))
    wrong = [f"{name}: {value:.1f}" for name, value in values.items() if value > LIMITS[name]]
    wrong += [f"it ended with {status}"] if status else []
    wrong += ["a traceback in the log"] if "Traceback" in log else []
    return sorted(figures.wrong) + wrong


def play(node: Node, running: Daemon, state: Path, dice: random.Random, seconds: float) -> Figures:
    """Change engines for so many seconds of the machine's time; return what was measured."""
    figures = Figures()
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if dice.random() < CHANGE_PROBABILITY:
            node.change(dice)
        with suppress(httpx.HTTPError):
            figures.judge(running.get("/metrics").text, node)
        figures.measure(running.process.pid, state)
        node.nvml.forget_calls()
        time.sleep(LOOK_SECONDS)
    node.settle()
    names = {engine.pod for engine in node.engines}
    eventually(lambda: list_pods(running) == names, "the page has exactly the engines that are there", SETTLE_SECONDS)
    return figures


def main() -> int:
    """Play, report, and return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--days", type=float, default=1.0, help="of the daemon's time")
    parser.add_argument("--speed", type=float, default=USUAL_SPEED, help="how many times as fast its clock runs")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--log", type=Path, help="a file for the daemon's log")
    args = parser.parse_args()
    print(f"seed {args.seed}: {args.days:g} days at {args.speed:g} times the speed", flush=True)
    dice = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        state = folder / "state"
        gpus = [FakeGpu(uuid=f"GPU-{number}", used_bytes=GIB) for number in range(ENGINES)]
        servers = [stack.enter_context(EngineServer(reset)) for _ in range(2 * ENGINES)]
        engines = [Engine(gpu, servers[gpu]) for gpu in range(ENGINES)]
        node = Node(NodeTree(folder), FakeNvml(folder, gpus), engines, deque(servers[ENGINES:]))
        for engine in engines:
            node.create(engine)
        settings = {
            "ENGINES": "node",
            "ENGINE_TIMEOUT_SECONDS": "1",
            "SAMPLE_INTERVAL_SECONDS": str(SAMPLE_SECONDS),
            "GPU_SAMPLE_INTERVAL_SECONDS": str(SAMPLE_SECONDS),
            "STATE_DIR": str(state),
            "SPEED": str(args.speed),
            "BEGAN": repr(time.time()),
            "NODE_TREE": str(folder),
            **node.nvml.environment(),
        }
        with daemon(module="tests.e2e.hurried", **settings) as running:
            names = {engine.pod for engine in engines}
            eventually(lambda: list_pods(running) == names, "all are found", SETTLE_SECONDS)
            began = time.monotonic()
            figures = play(node, running, state, dice, args.days * 86400 / args.speed)
            hours = (time.monotonic() - began) * args.speed / 3600
            status, _ = running.stop()
            wrong = report(figures, node, hours=hours, log=running.log(), status=status)
            if args.log:
                args.log.write_text(running.log())
    print("\n".join(wrong) if wrong else "nothing grew")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
