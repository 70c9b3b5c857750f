"""The command over a sidecar's own endpoint."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from tests.process import eventually
from tests.unit.expose.views import day
from vllm_headroom.expose.snapshot import document

LEAK = document(day(leaking=frozenset({0})))
WATCH = (sys.executable, "-m", "vllm_headroom", "watch")


@contextmanager
def sidecar(status: int = 200, body: bytes = json.dumps(LEAK).encode()) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/snapshot.json"
            self.send_response(status if found else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def asked(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*WATCH, *arguments], capture_output=True, text=True, check=False, timeout=60)


def test_json_asks_once() -> None:
    with sidecar() as url:
        done = asked(url, "--json")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(json.dumps(LEAK))


def test_without_an_answer_json_ends_with_one_line() -> None:
    done = asked("http://127.0.0.1:9", "--json")

    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "http://127.0.0.1:9/snapshot.json does not answer" in done.stderr


def test_what_is_no_sidecar_is_named() -> None:
    with sidecar(body=b"{}") as url:
        assert "is not vllm-headroom's" in asked(url, "--json").stderr
    with sidecar(body=b"<html>") as url:
        assert "is not vllm-headroom's" in asked(url, "--json").stderr
    with sidecar(status=503) as url:
        assert "answers 503" in asked(url, "--json").stderr


def test_away_from_a_terminal_it_writes_lines_and_ends_well() -> None:
    with sidecar() as url, subprocess.Popen([*WATCH, url], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0

    assert line == "alarm: GPU 0 leaks: out of memory in 4 h 0 min, 2 h 0 min at the least.\n"


def test_on_a_terminal_it_draws_and_leaves_it_as_it_was() -> None:
    ours, theirs = pty.openpty()
    shown = bytearray()

    def drawn(text: bytes) -> bool:
        shown.extend(os.read(ours, 65536))
        return text in shown

    with sidecar() as url:
        process = subprocess.Popen([*WATCH, url], stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"})
        eventually(lambda: drawn(b"ALARM"), "the verdict is drawn")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        eventually(lambda: drawn(b"\x1b[?1049l"), "the terminal is as it was")
    os.close(ours)
    os.close(theirs)
