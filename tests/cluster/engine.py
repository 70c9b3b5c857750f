#!/usr/bin/env python3
"""Replace vLLM in a pod: its processes, its page and the memory that they hold, steered by a file while it runs.

usage: vllm serve MODEL [OPTION]...     needs Python's standard library alone

With ENGINE_FOLLOWS, the address of a sidecar's page, /health follows the state of the engine there, which is simulated.
It writes what the GPU holds where the fake NVML of the pod's containers reads it. SHARED is a folder that outlives the
container, with what this one and those after it do:

  load_seconds   how long a start takes
  orders         one a line, done as it is written: work, idle, queue REQUESTS, die, hang, oom, exit,
                 leak BYTES_A_SECOND
  next           the orders of every later start, done once it serves
  fail           where it exists, and where ENGINE_FAILS is set, a start ends with status 1 when it has loaded
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final
from urllib.request import urlopen

SHARED: Final = Path(os.environ.get("ENGINE_SHARED", "/run/nvml"))
FOLLOWS: Final = os.environ.get("ENGINE_FOLLOWS", "")
SERVING: Final = re.compile(r'^headroom_engine_state\{[^}]*state="serving"[^}]*\} 1', re.MULTILINE)
PORT: Final = 8000
LOOK_SECONDS: Final = 0.2
GIB: Final = 2**30
WEIGHTS_BYTES: Final = 70 * GIB
IDLE_CARD_BYTES: Final = 600 * 2**20
PR_SET_NAME: Final = 15
"""Of prctl(2): sets the name by which /proc lists a process, as vLLM's own do."""

PAGE: Final = """\
vllm:num_requests_running{{model_name="{model}",engine="0"}} {running}
vllm:num_requests_waiting{{model_name="{model}",engine="0"}} {waiting}
vllm:kv_cache_usage_perc{{model_name="{model}",engine="0"}} {kv_used}
vllm:num_preemptions_total{{model_name="{model}",engine="0"}} 0
vllm:prompt_tokens_total{{model_name="{model}",engine="0"}} {tokens}
vllm:generation_tokens_total{{model_name="{model}",engine="0"}} {tokens}
vllm:request_success_total{{model_name="{model}",engine="0",finished_reason="stop"}} {finished}
vllm:prefix_cache_queries_total{{model_name="{model}",engine="0"}} {tokens}
vllm:prefix_cache_hits_total{{model_name="{model}",engine="0"}} {hits}
vllm:cache_config_info{{model_name="{model}",engine="0",block_size="16",num_gpu_blocks="20000",\
gpu_memory_utilization="0.9",kv_cache_memory_bytes="None"}} 1
vllm:engine_sleep_state{{model_name="{model}",engine="0",sleep_state="awake"}} 1
process_start_time_seconds {started}
"""


class Engine:
    """The processes of the server and its core, and the figures of the page."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.started_seconds = time.time()
        self.is_working = True
        self.is_hung = False
        self.waiting = 0
        self.finished = 0
        self.leak_bytes_per_second = 0
        self.leaks_since_seconds = 0.0
        self.core = subprocess.Popen(["VLLM::EngineCore", __file__, "core"], executable=sys.executable)

    def write_card(self, core_bytes: int) -> None:
        """Write what NVML reports: the card, and the core with its memory unless it holds none."""
        used_bytes = IDLE_CARD_BYTES + core_bytes
        lines = [
            "driver 580.95.05",
            f"gpu GPU-{os.environ.get('HOSTNAME', 'stand-in')}",
            "name NVIDIA H100 80GB HBM3",
            f"memory {80 * GIB} {used_bytes} {IDLE_CARD_BYTES}",
            f"utilization {60 if self.is_working and core_bytes else 0}",
        ]
        if core_bytes:
            lines.append(f"process {self.core.pid} {core_bytes}")
        unfinished = SHARED / "nvml.new"
        unfinished.write_text("\n".join(lines) + "\n")
        unfinished.replace(SHARED / "nvml.txt")

    def render_page(self) -> str:
        """Return the page of metrics; what finishes follows the clock while it works."""
        if self.is_working and not self.is_hung:
            self.finished = int(2 * (time.time() - self.started_seconds))
        return PAGE.format(
            model=self.model,
            running=3 if self.is_working else 0,
            waiting=self.waiting,
            kv_used=0.1 if self.is_working else 0,
            tokens=200 * self.finished,
            hits=100 * self.finished,
            finished=self.finished,
            started=self.started_seconds,
        )

    def obey(self, order: str) -> None:
        """Do what one word says."""
        sys.stdout.write(f"order: {order}\n")
        sys.stdout.flush()
        if order in {"work", "idle"}:
            self.is_working = order == "work"
        elif order.startswith("queue "):
            self.waiting = int(order.split()[1])
        elif order == "hang":
            self.is_hung = True
        elif order == "die":
            self.core.kill()
        elif order == "oom":
            self.core.send_signal(signal.SIGUSR1)
        elif order == "exit":
            self.stop(0)
        elif order.startswith("leak "):
            self.leak_bytes_per_second = int(order.split()[1])
            self.leaks_since_seconds = time.time()
        elif order.startswith("after "):
            time.sleep(float(order.split()[1]))

    def leak(self) -> None:
        """Write what the core holds by now, if it leaks."""
        if self.leak_bytes_per_second:
            leaked_bytes = self.leak_bytes_per_second * (time.time() - self.leaks_since_seconds)
            self.write_card(WEIGHTS_BYTES + int(leaked_bytes))

    def stop(self, status: int) -> None:
        """End both processes, and give the memory of the card back first."""
        self.write_card(0)
        self.core.kill()
        os._exit(status)


def run_core() -> None:
    """Be the core: idle until it is killed; at SIGUSR1 take host memory without end."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, b"VLLM::EngineCor", 0, 0, 0)
    hoard: list[bytearray] = []

    def take(*_: object) -> None:
        while True:
            hoard.append(bytearray(b"x" * 2**24))

    signal.signal(signal.SIGUSR1, take)
    while True:
        signal.pause()


def follow_orders(engine: Engine) -> None:
    """Do what is written from now on; first what every start does."""
    orders = SHARED / "orders"
    later = SHARED / "next"
    done_bytes = orders.stat().st_size if orders.exists() else 0
    if later.exists():
        for order in later.read_text().splitlines():
            engine.obey(order)
    while True:
        time.sleep(LOOK_SECONDS)
        engine.leak()
        if not orders.exists():
            continue
        text = orders.read_text()
        for order in text[done_bytes:].splitlines():
            engine.obey(order)
        done_bytes = len(text)


def is_healthy() -> bool:
    """Return whether the engine that it follows serves; without one, True."""
    if not FOLLOWS:
        return True
    try:
        with urlopen(FOLLOWS, timeout=5) as page:  # noqa: S310 - the pod's own sidecar
            return bool(SERVING.search(page.read().decode()))
    except OSError:
        return False


def serve(model: str) -> None:
    """Load, serve until the core ends, and end with status 1 then, as vLLM does."""
    engine = Engine(model)
    signal.signal(signal.SIGTERM, lambda *_: engine.stop(0))
    engine.write_card(0)
    load = SHARED / "load_seconds"
    time.sleep(float(load.read_text() if load.exists() else os.environ.get("ENGINE_LOAD_SECONDS", "5")))
    engine.write_card(WEIGHTS_BYTES)
    if (SHARED / "fail").exists() or "ENGINE_FAILS" in os.environ:
        engine.stop(1)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers: dict[str, Callable[[], str]] = {
                "/metrics": engine.render_page,
                "/health": str,
                "/version": lambda: '{"version": "0.32.0"}',
            }
            answers["/v1/models"] = lambda: f'{{"data": [{{"id": "{model}"}}]}}'
            answer = answers.get(self.path)
            body = b"" if answer is None else answer().encode()
            status = 404 if answer is None else 200
            if self.path == "/health" and not is_healthy():
                status = 503
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("", PORT), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    threading.Thread(target=follow_orders, args=(engine,), daemon=True).start()
    status = engine.core.wait()
    sys.stdout.write(f"EngineDeadError: the core ended with status {status}\n")
    sys.stdout.flush()
    engine.stop(1)


if __name__ == "__main__":
    if sys.argv[1:] == ["core"]:
        run_core()
    else:
        serve(sys.argv[2])
