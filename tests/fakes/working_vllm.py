"""The processes of a vLLM: a server, its core, which does the work, and a worker below the core.

usage: python vllm serve m --port PORT, with this file as `vllm`, the repository on PYTHONPATH and a folder in $FOLDER,
where the core counts its steps; below it are as many workers as $WORKERS says. The page is there from when the folder
has a file `ready`, and says what was counted. Where the folder has a file `idle`, nothing runs; the page says what the
server has completed, which takes a step each. While the folder has a file `broken`, the page is an error of the server;
with `late` it never comes, and with `stale` it stays as it is. Where $PART is root, an API server below this process
serves the page.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

from tests.fakes.engine_server import EngineServer, Hangup, hang, page

CORE: Final = """
import os, subprocess, sys, time
from pathlib import Path
folder, count = Path(os.environ["FOLDER"]), int(os.environ.get("WORKERS", "1"))
workers = [subprocess.Popen([f"VLLM::Worker_TP{rank}", "infinity"], executable="/bin/sleep") for rank in range(count)]
(folder / "pids.new").write_text(" ".join(map(str, [os.getppid(), os.getpid(), *(each.pid for each in workers)])))
(folder / "pids.new").rename(folder / "pids")
for step in range(1, 10**9):
    (folder / "steps.new").write_text(str(step))
    (folder / "steps.new").rename(folder / "steps")
    time.sleep(0.02)
"""


def text(steps: int, started: float, running: int = 2) -> str:
    """Return the page of an engine that runs so many requests and has taken so many steps."""
    labels = '{engine="0",model_name="m"}'
    return (
        f"process_start_time_seconds {started}\n"
        f"vllm:num_requests_running{labels} {running}.0\n"
        f"vllm:num_requests_waiting{labels} 0.0\n"
        f"vllm:generation_tokens_total{labels} {2 * steps}.0\n"
        f"vllm:iteration_tokens_total_count{labels} {steps}.0\n"
    )


def began() -> float:
    """Return when this process began, in seconds since the epoch, as vLLM's page shows it of the server."""
    boot = Path("/proc/stat").read_text().partition("btime ")[2].split()[0]
    ticks = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()[19]
    return int(boot) + int(ticks) / os.sysconf("SC_CLK_TCK")


def start_the_others(folder: Path) -> None:
    """Start the core, and where it serves the page the API server below this process, which then only waits."""
    part = os.environ.get("PART")
    if part != "server":
        subprocess.Popen(["VLLM::EngineCore", "-c", CORE], executable=sys.executable)
    if part == "root":
        title, below = "VLLM::APIServer_0", {**os.environ, "PART": "server"}
        child = subprocess.Popen([title, *sys.argv], executable=sys.executable, env=below)
        (folder / "server.new").write_text(str(child.pid))
        (folder / "server.new").rename(folder / "server")
        threading.Event().wait()


def main() -> None:
    """Serve until killed; the core and the worker are not taken along.

    No thread is started before the core has taken a step: it would race with the worker for the next pid.
    """
    folder, started = Path(os.environ["FOLDER"]), began()
    start_the_others(folder)
    while not all((folder / name).exists() for name in ("steps", "ready")):
        time.sleep(0.02)

    def steps() -> int:
        return int((folder / "steps").read_text())

    completed, idle, shown = list[int](), (folder / "idle").exists(), [""]

    def answer(connection: socket.socket, closing: threading.Event) -> None:
        if server.path == "/metrics":
            if (folder / "broken").exists():
                page("", status="500 Internal Server Error")(connection, closing)
                return
            if (folder / "late").exists():
                hang(connection, closing)
                raise Hangup
            if not (folder / "stale").exists():
                shown[0] = text(len(completed), started, running=0) if idle else text(steps(), started)
            page(shown[0])(connection, closing)
        elif server.path == "/v1/completions":
            now = steps()
            while steps() == now and not closing.wait(0.02):
                pass
            completed.append(now)
            page('{"choices":[{}]}')(connection, closing)
        else:
            page("", status="200 OK" if server.path == "/health" else "404 Not Found")(connection, closing)

    with EngineServer(answer, port=int(sys.argv[-1])) as server:
        threading.Event().wait()


if __name__ == "__main__":
    main()
