"""A vLLM whose every request leaks GPU memory: at the limit it dies, as one that runs out of memory does.

usage: python leaking_server.py serve m --port PORT HELD LOADS_SECONDS REQUEST_SECONDS HELD_BYTES LEAK_BYTES LIMIT_BYTES

What it holds is in the file HELD, for there is no GPU. On SIGTERM it aborts what runs, as vLLM does by default.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar, Final

OUT_OF_MEMORY: Final = 1
LABELS: Final = '{engine="0",model_name="m"}'


class Server(BaseHTTPRequestHandler):
    """Answers /health and /metrics at once, and anything that is posted after a while."""

    lock: ClassVar = threading.Lock()
    began: ClassVar[float] = time.time()
    running: ClassVar[int] = 0
    finished: ClassVar[int] = 0
    held_bytes: ClassVar[int] = 0
    held: ClassVar[Path]
    request_seconds: ClassVar[float]
    leak_bytes: ClassVar[int]
    limit_bytes: ClassVar[int]

    @classmethod
    def count(cls, running: int) -> None:
        """Take note of a request that begins, or with -1 of one that ends, and leaks."""
        with cls.lock:
            cls.running += running
            if running < 0:
                cls.finished += 1
                cls.held_bytes += cls.leak_bytes
            if cls.held_bytes > cls.limit_bytes:
                os._exit(OUT_OF_MEMORY)
            cls.tell()

    @classmethod
    def tell(cls) -> None:
        unfinished = cls.held.with_suffix(".unfinished")
        unfinished.write_text(str(cls.held_bytes))
        unfinished.replace(cls.held)

    def do_GET(self) -> None:
        self.answer(self.page() if self.path == "/metrics" else "")

    def do_POST(self) -> None:
        self.count(1)
        time.sleep(self.request_seconds)
        self.count(-1)
        self.answer('{"choices":[{}]}')

    def page(self) -> str:
        return (
            f"process_start_time_seconds {self.began}\n"
            f"vllm:num_requests_running{LABELS} {self.running}.0\n"
            f"vllm:num_requests_waiting{LABELS} 0.0\n"
            f'vllm:request_success_total{{engine="0",model_name="m",finished_reason="stop"}} {self.finished}.0\n'
            f"vllm:generation_tokens_total{LABELS} {100 * self.finished + self.running}.0\n"
        )

    def answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def main(port: str, text: str, loads_seconds: str, request_seconds: str, *n_bytes: str) -> None:
    """Serve until killed."""
    time.sleep(float(loads_seconds))
    Server.held, Server.request_seconds = Path(text), float(request_seconds)
    Server.held_bytes, Server.leak_bytes, Server.limit_bytes = map(int, n_bytes)
    Server.tell()
    ThreadingHTTPServer.request_queue_size = 128
    ThreadingHTTPServer(("127.0.0.1", int(port)), Server).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[4:])
